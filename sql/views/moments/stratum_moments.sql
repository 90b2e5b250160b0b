-- The pooled moments M(g) of every action: documents of a stratum with equal weight, then the strata that the action
-- has with equal weight (stratum 'pooled').
with

moments as (
    select * from main.moments
),

strata as materialized (
    select
        study,
        model,
        split,
        stratum,
        action,
        count(*) as documents,
        cast(sum(replicates) as bigint) as trajectories,
        count(*) filter (where cohort > 0) as cohort_documents,
        cast(sum(round(cohort * replicates)) as bigint) as cohort_paths,
        avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicates)))
    from moments
    group by study, model, split, stratum, action
),

pooled as (
    select
        study,
        model,
        split,
        'pooled' as stratum,
        action,
        cast(sum(documents) as bigint) as documents,
        cast(sum(trajectories) as bigint) as trajectories,
        cast(sum(cohort_documents) as bigint) as cohort_documents,
        cast(sum(cohort_paths) as bigint) as cohort_paths,
        avg(columns(* exclude (
            study, model, split, stratum, action, documents, trajectories, cohort_documents, cohort_paths
        )))
    from strata
    group by study, model, split, action
)

select * from strata
union all by name
select * from pooled
