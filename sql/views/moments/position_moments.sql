-- Replicate means at each position of the generation clock, one row per document, action and t.
with

means as (
    select
        study, model, doc, action, t,
        count(*) as replicates,
        avg(delta) as delta,
        avg(f) as f,
        avg(mismatch) as mismatch,
        avg(cast(coalesce(lag = 0, false) as integer)) as first_mismatch
    from main.steps
    semi join main.analyzed_trajectories using (study, model, doc, action, replicate)
    group by study, model, doc, action, t
)

select
    study, model, split, stratum, cluster, doc, action, t,
    replicates, delta, f, mismatch, first_mismatch
from means
inner join main.documents using (study, model, doc)
