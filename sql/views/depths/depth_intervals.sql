-- Bounds on R from a branch window of depth L, by coupled pairs ('plain') and by residual branching ('swrb'): the
-- identified interval [R_L, R_L + B_L] with its minimax point, the realized tail R_H - R_L, and the Hoeffding enclosure
-- of R, which includes the sampling of documents. The enclosure assumes independent documents, so it does not hold for
-- clusters of several documents. Its level is 1 - alpha = .95.
with

documents as (
    select study, model, split, stratum, action, 'plain' as estimator, depth, observed, capacity
    from internal.depth_moments
    union all by name
    select
        study, model, split, stratum, action, 'swrb' as estimator, depth,
        avg(observed) as observed,
        avg(capacity) as capacity
    from internal.branching_depths
    inner join internal.analyzed_branchings using (study, model, doc, action, replicate)
    group by study, model, split, stratum, doc, action, depth
),

strata as (
    select
        study, model, split, stratum, action, estimator, depth,
        count(*) as documents,
        1 / count(*) as squared_weights,
        avg(observed) as observed,
        avg(capacity) as capacity
    from documents
    group by study, model, split, stratum, action, estimator, depth
),

windows_of_depth as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action, estimator, depth,
        cast(sum(documents) as bigint) as documents,
        sum(squared_weights) / (count(*) * count(*)) as squared_weights,
        avg(observed) as observed,
        avg(capacity) as capacity
    from strata
    group by study, model, split, rollup (stratum), action, estimator, depth
),

intervals as (
    select
        *,
        observed as lower,
        observed + capacity as upper,
        observed + capacity / 2 as midpoint,
        capacity / 2 as half_width,
        last_value(observed) over (
            partition by study, model, split, stratum, action, estimator
            order by depth
            rows between unbounded preceding and unbounded following
        ) - observed as realized_tail,
        cast(0.95 as double) as level
    from windows_of_depth
),

enclosures as (
    select *, sqrt(ln(4 / (1 - level)) * squared_weights / 2) as epsilon
    from intervals
)

select
    study, model, split, stratum, action, estimator, depth, documents,
    observed, capacity, lower, upper, midpoint, half_width, realized_tail,
    greatest(0, lower - epsilon) as enclosure_low,
    least(1, upper + epsilon) as enclosure_high,
    level
from enclosures
