-- Replicate means of every moment of answers, one row per document with answers and action.
select
    study, model, split, stratum, cluster, doc, action,
    count(*) as replicates,
    avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicate)))
from internal.trajectory_answers
group by study, model, split, stratum, cluster, doc, action
