-- Bounds on R(action) - R(baseline) from a branch window of depth L, over the documents both have. The contrast lies in
-- [contrast_low, contrast_high]. If this interval excludes 0, the order of the two actions is certain.
with

depth_moments as materialized (select * from internal.depth_moments),

shared as (
    select
        own.study, own.model, own.split, own.stratum, baselines.action as baseline, own.action, own.depth,
        own.observed,
        own.capacity,
        baselines.observed as baseline_observed,
        baselines.capacity as baseline_capacity
    from depth_moments as own
    inner join depth_moments as baselines using (study, model, doc, depth)
    where own.action <> baselines.action
),

strata as (
    select
        study, model, split, stratum, baseline, action, depth,
        count(*) as documents,
        avg(columns(* exclude (study, model, split, stratum, baseline, action, depth)))
    from shared
    group by study, model, split, stratum, baseline, action, depth
),

pairs as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        baseline, action, depth,
        cast(sum(documents) as bigint) as documents,
        avg(columns(* exclude (study, model, split, stratum, baseline, action, depth, documents)))
    from strata
    group by study, model, split, rollup (stratum), baseline, action, depth
),

contrasts as (
    select
        study, model, split, stratum, baseline, action, depth, documents,
        observed - (baseline_observed + baseline_capacity) as contrast_low,
        (observed + capacity) - baseline_observed as contrast_high
    from pairs
)

select *, contrast_low > 0 or contrast_high < 0 as ordered
from contrasts
