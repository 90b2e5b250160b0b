-- The branch clock in the fixed cohort tau <= T: E[delta_{tau+j} | tau <= T], and the same of mismatches and of steps
-- before EOS, as ratios of moments, with the cohort's documents and paths. Null if the cohort is empty.
with

strata as (
    select
        study, model, split, stratum, action, lag,
        count(*) filter (where cohort_paths > 0) as documents,
        sum(cohort_paths) as paths,
        avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, lag, replicates, cohort_paths)))
    from internal.lag_moments
    group by study, model, split, stratum, action, lag
),

cohorts as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action, lag,
        cast(sum(documents) as bigint) as documents,
        cast(sum(paths) as bigint) as paths,
        avg(columns(* exclude (study, model, split, stratum, action, lag, documents, paths)))
    from strata
    group by study, model, split, rollup (stratum), action, lag
)

select
    study, model, split, stratum, action, lag,
    cohort_delta / nullif(cohort, 0) as delta,
    cohort_mismatch / nullif(cohort, 0) as mismatch,
    cohort_pre_eos / nullif(cohort, 0) as pre_eos_fraction,
    documents,
    paths
from cohorts
