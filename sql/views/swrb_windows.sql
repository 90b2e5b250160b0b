-- What a branch window of depth L says of R, measured by residual branching: identified_interval with the replicates'
-- Z_L and W_L in place of those of coupled pairs. A replicate's window and tail share one suffix, but W_L counts every
-- branch that its scan passed: the realized tail is within the capacity in expectation, not in every sample.
with

branchings as (
    select * from main.analyzed_branchings
),

branching_depths as (
    select * from main.branching_depths
),

documents as (
    select
        branchings.study,
        branchings.model,
        branchings.split,
        branchings.stratum,
        branchings.doc,
        branchings.action,
        branching_depths.depth,
        avg(branching_depths.observed) as observed,
        avg(branching_depths.capacity) as capacity
    from branching_depths
    inner join branchings using (study, model, doc, action, replicate)
    group by
        branchings.study,
        branchings.model,
        branchings.split,
        branchings.stratum,
        branchings.doc,
        branchings.action,
        branching_depths.depth
),

strata as materialized (
    select
        study,
        model,
        split,
        stratum,
        action,
        depth,
        count(*) as documents,
        1 / count(*) as squared_weights,
        avg(observed) as observed,
        avg(capacity) as capacity
    from documents
    group by study, model, split, stratum, action, depth
),

pooled as (
    select
        study,
        model,
        split,
        'pooled' as stratum,
        action,
        depth,
        cast(sum(documents) as bigint) as documents,
        sum(squared_weights) / (count(*) * count(*)) as squared_weights,
        avg(observed) as observed,
        avg(capacity) as capacity
    from strata
    group by study, model, split, action, depth
),

windows_of_depth as (
    select * from strata
    union all by name
    select * from pooled
),

intervals as (
    select
        *,
        observed as lower,
        observed + capacity as upper,
        observed + capacity / 2 as midpoint,
        capacity / 2 as half_width,
        last_value(observed) over (
            partition by study, model, split, stratum, action
            order by depth
            rows between unbounded preceding and unbounded following
        ) - observed as realized_tail,
        cast(0.95 as double) as level
    from windows_of_depth
),

enclosures as (
    select
        *,
        sqrt(ln(4 / (1 - level)) * squared_weights / 2) as epsilon
    from intervals
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
    greatest(0, lower - epsilon) as enclosure_low,
    least(1, upper + epsilon) as enclosure_high,
    level
from enclosures
