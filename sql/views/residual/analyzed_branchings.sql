-- The replicates of residual branching that enter estimates, with their document's split and stratum. As in
-- analyzed_trajectories, a replicate enters if it is complete, ends at its study's horizon and has a row in documents.
select
    study, model, split, stratum, cluster, doc, action, replicate,
    horizon, scanned, mass, branch, mismatches
from internal.branchings
inner join main.windows using (study, model, horizon)
inner join main.documents using (study, model, doc)
where complete
