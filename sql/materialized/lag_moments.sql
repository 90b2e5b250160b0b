-- The stored rows of lag_moments.
select
    study, model, split, stratum, cluster, doc, action,
    cast(unnest(range(1, len(lag_cohort_delta) + 1)) as integer) as lag,
    cast(replicates as bigint) as replicates, cohort_paths, scalar_cohort as cohort,
    unnest(lag_cohort_delta) as cohort_delta,
    unnest(lag_cohort_mismatch) as cohort_mismatch,
    unnest(lag_cohort_pre_eos) as cohort_pre_eos
from internal.document_moments
inner join main.documents using (study, model, doc)
