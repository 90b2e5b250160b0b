-- The pooled moments M(g) of every action: documents of a stratum with equal weight, then the strata that the action
-- has with equal weight (stratum 'pooled').
-- Here and in every view that pools strata, rollup (stratum) gives one row for each stratum and one row for all strata.
-- Means are summed in the order of documents and of strata, since another order could change the last bits.
with

strata as (
    select
        study, model, split, stratum, action,
        count(*) as documents,
        cast(sum(replicates) as bigint) as trajectories,
        count(*) filter (where cohort > 0) as cohort_documents,
        cast(sum(round(cohort * replicates)) as bigint) as cohort_paths,
        avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicates)) order by doc)
    from main.moments
    group by study, model, split, stratum, action
)

select
    study, model, split,
    coalesce(stratum, 'pooled') as stratum,
    action,
    cast(sum(documents) as bigint) as documents,
    cast(sum(trajectories) as bigint) as trajectories,
    cast(sum(cohort_documents) as bigint) as cohort_documents,
    cast(sum(cohort_paths) as bigint) as cohort_paths,
    avg(columns(* exclude (
        study, model, split, stratum, action, documents, trajectories, cohort_documents, cohort_paths
    )) order by stratum)
from strata
group by study, model, split, rollup (stratum), action
