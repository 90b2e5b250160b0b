-- Early and late windows of the branch clock: means over their lags in the cohort tau <= T, means over the steps before
-- EOS alone, and the fraction of each window's steps before EOS. Null if the cohort or the window is empty.
with

divisors as (
    select
        stratum_moments.*,
        nullif(cohort, 0) as members,
        nullif(early_pre_eos_steps, 0) as early_steps,
        nullif(late_pre_eos_steps, 0) as late_steps,
        nullif(greatest(early_last, 0), 0) as early_lags,
        nullif(greatest(cohort_bound - late_first + 1, 0), 0) as late_lags
    from internal.stratum_moments
    inner join main.windows using (study, model)
),

means as (
    select
        *,
        early_delta / members as early,
        late_delta / members as late,
        early_pre_eos_delta / early_steps as early_pre_eos,
        late_pre_eos_delta / late_steps as late_pre_eos
    from divisors
)

select
    study, model, split, stratum, action,
    cohort as cohort_fraction,
    cohort_documents as documents,
    cohort_paths as paths,
    early,
    late,
    late - early as late_minus_early,
    early_pre_eos,
    late_pre_eos,
    late_pre_eos - early_pre_eos as late_minus_early_pre_eos,
    early_pre_eos_steps / (early_lags * members) as early_pre_eos_fraction,
    late_pre_eos_steps / (late_lags * members) as late_pre_eos_fraction
from means
