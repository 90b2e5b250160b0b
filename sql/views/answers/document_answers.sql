-- Replicate means of every moment of answers, one row per document with answers and action. The order of the sum makes
-- every run's last bits the same.
select
    study, model, split, stratum, cluster, doc, action,
    count(*) as replicates,
    avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicate)) order by replicate)
from internal.trajectory_answers
group by study, model, split, stratum, cluster, doc, action
