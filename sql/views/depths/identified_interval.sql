-- Bounds on R from a branch window of depth L, by coupled pairs: the plain rows of depth_intervals.
select * exclude (estimator)
from internal.depth_intervals
where estimator = 'plain'
