-- The stored rows of depth_moments.
select
    study, model, split, stratum, cluster, doc, action,
    cast(unnest(range(1, len(depth_observed) + 1)) as integer) as depth,
    cast(replicates as bigint) as replicates,
    unnest(depth_observed) as observed,
    unnest(depth_capacity) as capacity
from internal.document_moments
inner join main.documents using (study, model, doc)
