-- Replicate means of every moment of answers, one row per document with answers and action. The sum has a fixed order,
-- so that every run gives the same last bits.
select
    study, model, split, stratum, cluster, doc, action,
    count(*) as replicates,
    avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicate)) order by replicate)
from internal.trajectory_answers
group by study, model, split, stratum, cluster, doc, action
