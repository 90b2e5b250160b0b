-- Replicate means of every moment of trajectory_moments, one row per document and action: documents are the
-- statistical unit, and everything below and all resampling is built from these rows.
select
    study, model, split, stratum, cluster, doc, action,
    count(*) as replicates,
    avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicate)))
from internal.trajectory_moments
group by study, model, split, stratum, cluster, doc, action
