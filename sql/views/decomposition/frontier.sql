-- What an action costs and what it loses: bytes of the cache beside divergence and accuracy. All are pooled as moments
-- are, documents of a stratum with equal weight, then strata; the share is a ratio of means of bytes. A mean of bytes is
-- null where a document does not say. Moments are read once: where none are stored they are computed from steps.
with

strata as materialized (
    select
        study, model, split, stratum, action,
        list(doc) as docs,
        count(*) as documents,
        cast(sum(replicates) as bigint) as trajectories,
        avg(mismatch order by doc) as mismatch,
        avg(exposure order by doc) as exposure,
        avg(diverged order by doc) as diverged,
        avg(entry order by doc) as entry
    from main.moments
    group by study, model, split, stratum, action
),

divergence as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action,
        cast(sum(documents) as bigint) as documents,
        cast(sum(trajectories) as bigint) as trajectories,
        avg(mismatch order by stratum) as mismatch,
        avg(exposure order by stratum) as exposure,
        avg(diverged order by stratum) as diverged,
        avg(entry order by stratum) as entry
    from strata
    group by study, model, split, rollup (stratum), action
),

documents as (
    select study, model, split, stratum, action, unnest(docs) as doc
    from strata
),

strata_caches as (
    select
        study, model, split, stratum, action,
        case when count(cache_bytes) = count(*) then avg(cache_bytes) end as cache_bytes,
        case when count(full_cache_bytes) = count(*) then avg(full_cache_bytes) end as full_cache_bytes
    from documents
    left join internal.document_bytes using (study, model, doc, action)
    group by study, model, split, stratum, action
),

caches as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action,
        case when count(cache_bytes) = count(*) then avg(cache_bytes) end as cache_bytes,
        case when count(full_cache_bytes) = count(*) then avg(full_cache_bytes) end as full_cache_bytes
    from strata_caches
    group by study, model, split, rollup (stratum), action
),

answered as (
    select study, model, split, stratum, action, accuracy
    from main.answers
)

select
    study, model, split, stratum, action, documents,
    cache_bytes / nullif(full_cache_bytes, 0) as cache_share,
    cache_bytes, mismatch, exposure,
    entry / nullif(diverged, 0) as mean_entry,
    accuracy, trajectories,
    diverged as divergence_probability
from divergence
inner join caches using (study, model, split, stratum, action)
left join answered using (study, model, split, stratum, action)
