-- Bounds on R from a branch window of depth L, by residual branching: the swrb rows of depth_intervals. A replicate's
-- window and tail share one suffix, but W_L counts every branch that the replicate's scan passed. So the realized tail
-- is within the capacity in expectation, not in every sample.
select * exclude (estimator)
from internal.depth_intervals
where estimator = 'swrb'
