-- Replicate means at each lag of the branch clock, one row per document, action and lag 1..T. The denominator is all
-- replicates, in the cohort tau <= T or not; a document without a member has zeros. tau + j never passes 2T <= H.
select
    study, model, split, stratum, cluster, doc, action,
    cast(unnest(range(1, cohort_bound + 1)) as integer) as lag,
    replicates,
    cohort_paths,
    cohort_paths / replicates as cohort,
    unnest(lag_cohort_delta) / replicates as cohort_delta,
    unnest(lag_cohort_mismatch) / replicates as cohort_mismatch,
    unnest(lag_cohort_pre_eos) / replicates as cohort_pre_eos
from internal.profiles
