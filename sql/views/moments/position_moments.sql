-- Replicate means at each position of the generation clock, one row per document, action and t.
with

trajectories as (
    select * from main.analyzed_trajectories
),

steps as (
    select * from main.steps
),

documents as (
    select * from main.documents
),

means as (
    select
        steps.study,
        steps.model,
        steps.doc,
        steps.action,
        steps.t,
        count(*) as replicates,
        avg(steps.delta) as delta,
        avg(steps.f) as f,
        avg(steps.mismatch) as mismatch,
        avg(cast(coalesce(steps.lag = 0, false) as integer)) as first_mismatch
    from steps
    semi join trajectories using (study, model, doc, action, replicate)
    group by steps.study, steps.model, steps.doc, steps.action, steps.t
)

select
    means.study,
    means.model,
    documents.split,
    documents.stratum,
    documents.cluster,
    means.doc,
    means.action,
    means.t,
    means.replicates,
    means.delta,
    means.f,
    means.mismatch,
    means.first_mismatch
from means
inner join documents using (study, model, doc)
