-- What a branch window of depth L says of R, by coupled pairs: see depth_intervals.
with

depth_intervals as (
    select * from main.depth_intervals
)

select
    study,
    model,
    split,
    stratum,
    action,
    depth,
    documents,
    observed,
    capacity,
    lower,
    upper,
    midpoint,
    half_width,
    realized_tail,
    enclosure_low,
    enclosure_high,
    level
from depth_intervals
where estimator = 'plain'
