-- Replicate means at each position of the generation clock, one row per document, action and t.
with

profiles as (
    select
        study, model, doc, action, replicates,
        unnest(range(1, horizon + 1)) as t,
        unnest(position_delta) as delta,
        unnest(position_f) as f,
        unnest(position_mismatch) as mismatch,
        unnest(position_first_mismatch) as first_mismatch
    from internal.unit_moments
),

sums as (
    select
        study, model, doc, action, t,
        cast(sum(replicates) as bigint) as replicates,
        sum(delta) as delta,
        sum(f) as f,
        sum(mismatch) as mismatch,
        sum(first_mismatch) as first_mismatch
    from profiles
    group by study, model, doc, action, t
)

select
    study, model, split, stratum, cluster, doc, action,
    cast(t as integer) as t,
    replicates,
    delta / replicates as delta,
    f / replicates as f,
    mismatch / replicates as mismatch,
    first_mismatch / replicates as first_mismatch
from sums
inner join main.documents using (study, model, doc)
