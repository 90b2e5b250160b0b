-- Replicate means of every moment, one row per document and action: documents are the statistical unit, and everything
-- below and all resampling is built from these rows.
with

sums as (
    select
        study, model, doc, action,
        cast(sum(replicates) as bigint) as replicates,
        sum(columns('scalar_(.*)')) as '\1'
    from internal.unit_moments
    group by study, model, doc, action
),

means as (
    select
        study, model, doc, action, replicates,
        columns(* exclude (study, model, doc, action, replicates)) / replicates
    from sums
)

select
    study, model, split, stratum, cluster, doc, action,
    means.* exclude (study, model, doc, action)
from means
inner join main.documents using (study, model, doc)
