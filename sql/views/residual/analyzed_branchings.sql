-- The replicates of residual branching that enter estimates, with their document's split and stratum: those that are
-- complete, end at their study's horizon and have a row in documents, as analyzed_trajectories has it for coupled pairs.
select
    study, model, split, stratum, cluster, doc, action, replicate,
    horizon, scanned, mass, branch, mismatches
from internal.branchings
inner join main.windows using (study, model, horizon)
inner join main.documents using (study, model, doc)
where complete
