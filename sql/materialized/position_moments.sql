-- The stored rows of position_moments.
select
    study, model, split, stratum, cluster, doc, action,
    cast(unnest(range(1, len(position_delta) + 1)) as integer) as t,
    cast(replicates as bigint) as replicates,
    unnest(position_delta) as delta,
    unnest(position_f) as f,
    unnest(position_mismatch) as mismatch,
    unnest(position_first_mismatch) as first_mismatch
from internal.document_moments
inner join main.documents using (study, model, doc)
