-- The fraction of all positions whose rollout distance lies above the saturation threshold.
with

stratum_moments as (
    select * from main.stratum_moments
)

select
    study,
    model,
    split,
    stratum,
    action,
    saturation
from stratum_moments
