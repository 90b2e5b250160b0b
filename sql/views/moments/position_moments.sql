-- Replicate means at each position of the generation clock, one row per document, action and t.
select
    study, model, split, stratum, cluster, doc, action,
    cast(unnest(range(1, horizon + 1)) as integer) as t,
    replicates,
    unnest(position_delta) / replicates as delta,
    unnest(position_f) / replicates as f,
    unnest(position_mismatch) / replicates as mismatch,
    unnest(position_first_mismatch) / replicates as first_mismatch
from internal.profiles
