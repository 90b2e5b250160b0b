-- The bytes of a document's cache under every action, as stored for one sequence: kept keys and values, scales of
-- codecs, indices and per-layer lengths, and the part that no action can evict. Beside them stand the bytes of the full
-- cache: of the document's full-retention control, or with an engine of the floor, which repeats the reference.
with

caches as (
    select
        study, model, doc, action,
        max(payload_bytes + coalesce(scale_bytes, 0) + index_bytes + metadata_bytes) as cache_bytes,
        max(weight_bytes) as weight_bytes,
        max(fixed_bytes) as fixed_bytes
    from main.units
    group by study, model, doc, action
),

full_caches as (
    select study, model, doc, max(cache_bytes) as full_cache_bytes
    from caches
    semi join (
        select study, action from main.actions where control or (settings is not null and action = 'floor')
    ) as controls using (study, action)
    group by study, model, doc
)

select study, model, doc, action, cache_bytes, full_cache_bytes, weight_bytes, fixed_bytes
from caches
left join full_caches using (study, model, doc)
