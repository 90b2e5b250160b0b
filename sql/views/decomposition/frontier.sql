-- The cost and the loss of every action: bytes of the cache beside divergence and accuracy. All are pooled as moments
-- are: documents of a stratum with equal weight, then strata with equal weight. The share is a ratio of means of bytes.
-- A mean of bytes is null if a document does not say its bytes. Weights are those of the action's side, the same for all
-- documents. Moments are read once, since moments that are not stored are computed from steps.
with

strata as (
    select
        study, model, split, stratum, action,
        count(*) as documents,
        cast(sum(replicates) as bigint) as trajectories,
        avg(mismatch order by doc) as mismatch,
        avg(exposure order by doc) as exposure,
        avg(diverged order by doc) as diverged,
        avg(entry order by doc) as entry,
        case when count(cache_bytes) = count(*) then avg(cache_bytes) end as cache_bytes,
        case when count(full_cache_bytes) = count(*) then avg(full_cache_bytes) end as full_cache_bytes,
        case when count(fixed_bytes) = count(*) then avg(fixed_bytes) end as fixed_bytes,
        max(weight_bytes) as weight_bytes
    from main.moments
    left join internal.document_bytes using (study, model, doc, action)
    group by study, model, split, stratum, action
),

pooled as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action,
        cast(sum(documents) as bigint) as documents,
        cast(sum(trajectories) as bigint) as trajectories,
        avg(mismatch order by stratum) as mismatch,
        avg(exposure order by stratum) as exposure,
        avg(diverged order by stratum) as diverged,
        avg(entry order by stratum) as entry,
        case when count(cache_bytes) = count(*) then avg(cache_bytes) end as cache_bytes,
        case when count(full_cache_bytes) = count(*) then avg(full_cache_bytes) end as full_cache_bytes,
        case when count(fixed_bytes) = count(*) then avg(fixed_bytes) end as fixed_bytes,
        max(weight_bytes) as weight_bytes
    from strata
    group by study, model, split, rollup (stratum), action
)

select
    study, model, split, stratum, action, documents,
    cache_bytes / nullif(full_cache_bytes, 0) as cache_share,
    cache_bytes, mismatch, exposure,
    entry / nullif(diverged, 0) as mean_entry,
    accuracy, trajectories,
    diverged as divergence_probability,
    weight_bytes, fixed_bytes
from pooled
left join (select study, model, split, stratum, action, accuracy from main.answers) as answered
    using (study, model, split, stratum, action)
