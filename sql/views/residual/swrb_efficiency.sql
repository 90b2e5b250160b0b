-- The efficiency of residual branching relative to coupled pairs: the ratio of their variances per replicate over the
-- ratio of their costs. Every document with at least two replicates of each has a row. The rows of a stratum and of all
-- strata ('pooled') are ratios of means: documents of a stratum with equal weight, then strata with equal weight.
-- A mean is null if one of its documents lacks the value; a ratio is null if its denominator is 0.
with

swrb as (select * from main.swrb),

documents as (
    select
        branched.study, branched.model, branched.split, branched.stratum, branched.action, branched.doc,
        cast(1 as bigint) as documents,
        plain.risk_variance as plain_variance,
        branched.risk_variance as swrb_variance,
        plain.evaluations as plain_evaluations,
        branched.evaluations as swrb_evaluations,
        plain.seconds as plain_seconds,
        branched.seconds as swrb_seconds
    from swrb as branched
    inner join swrb as plain using (study, model, action, doc)
    where
        branched.estimator = 'swrb' and plain.estimator = 'plain'
        and branched.replicates >= 2 and plain.replicates >= 2
),

strata as (
    select
        study, model, split, stratum, action,
        sum(documents) as documents,
        avg(plain_variance) as plain_variance,
        avg(swrb_variance) as swrb_variance,
        case when count(plain_evaluations) = count(*) then avg(plain_evaluations) end as plain_evaluations,
        case when count(swrb_evaluations) = count(*) then avg(swrb_evaluations) end as swrb_evaluations,
        case when count(plain_seconds) = count(*) then avg(plain_seconds) end as plain_seconds,
        case when count(swrb_seconds) = count(*) then avg(swrb_seconds) end as swrb_seconds
    from documents
    group by study, model, split, stratum, action
),

pooled as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action,
        sum(documents) as documents,
        avg(plain_variance) as plain_variance,
        avg(swrb_variance) as swrb_variance,
        case when count(plain_evaluations) = count(*) then avg(plain_evaluations) end as plain_evaluations,
        case when count(swrb_evaluations) = count(*) then avg(swrb_evaluations) end as swrb_evaluations,
        case when count(plain_seconds) = count(*) then avg(plain_seconds) end as plain_seconds,
        case when count(swrb_seconds) = count(*) then avg(swrb_seconds) end as swrb_seconds
    from strata
    group by study, model, split, rollup (stratum), action
),

means as (
    select * from documents
    union all by name
    select * from pooled
),

ratios as (
    select
        *,
        plain_variance / nullif(swrb_variance, 0) as variance_ratio,
        swrb_evaluations / nullif(plain_evaluations, 0) as evaluation_ratio,
        swrb_seconds / nullif(plain_seconds, 0) as second_ratio
    from means
)

select
    study, model, split, stratum, action, doc,
    cast(documents as bigint) as documents,
    variance_ratio,
    evaluation_ratio,
    second_ratio,
    variance_ratio / nullif(evaluation_ratio, 0) as efficiency,
    variance_ratio / nullif(second_ratio, 0) as efficiency_in_seconds
from ratios
