-- The replicates of residual branching that enter estimates, with their document's split and stratum: those that are
-- complete, end at their study's horizon and have a row in documents, as analyzed_trajectories has it for coupled pairs.
with

branchings as (
    select * from main.branchings
),

documents as (
    select * from main.documents
),

windows as (
    select * from main.windows
)

select
    branchings.study,
    branchings.model,
    documents.split,
    documents.stratum,
    documents.cluster,
    branchings.doc,
    branchings.action,
    branchings.replicate,
    branchings.horizon,
    branchings.scanned,
    branchings.mass,
    branchings.branch,
    branchings.mismatches
from branchings
inner join windows using (study, model, horizon)
inner join documents using (study, model, doc)
where branchings.complete
