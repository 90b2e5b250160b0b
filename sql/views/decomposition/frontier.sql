-- What an action costs and what it loses: bytes of the cache beside divergence and accuracy. Bytes are pooled as moments
-- are, documents of a stratum with equal weight, then strata; the share is a ratio of these means. A mean over documents
-- is null where one of them does not say.
with

strata as (
    select
        study, model, split, stratum, action,
        case when count(cache_bytes) = count(*) then avg(cache_bytes) end as cache_bytes,
        case when count(full_cache_bytes) = count(*) then avg(full_cache_bytes) end as full_cache_bytes
    from main.moments
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
    from strata
    group by study, model, split, rollup (stratum), action
),

answered as (
    select study, model, split, stratum, action, accuracy
    from main.answers
)

select
    study, model, split, stratum, action, documents,
    cache_bytes / nullif(full_cache_bytes, 0) as cache_share,
    cache_bytes, mismatch, exposure, mean_entry, accuracy
from main.decomposition
inner join caches using (study, model, split, stratum, action)
left join answered using (study, model, split, stratum, action)
