-- The same by residual branching. A replicate's window and tail share one suffix, but W_L counts every branch that its
-- scan passed: the realized tail is within the capacity in expectation, not in every sample.
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
where estimator = 'swrb'
