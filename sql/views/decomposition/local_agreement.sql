-- Local agreement inside the branch cohort: the fraction of members with a long run of agreements before EOS, and the
-- fraction that mismatches again after an agreement. The denominator is the whole cohort; null if the cohort is empty.
select
    study, model, split, stratum, action,
    long_agreement / nullif(cohort, 0) as long_agreement,
    mismatch_after_agreement / nullif(cohort, 0) as mismatch_after_agreement
from internal.stratum_moments
