-- Local agreement inside the branch cohort: how many of its members have a long run of agreements before EOS, and how
-- many mismatch again after an agreement. The denominator is the whole cohort; null where it is empty.
select
    study, model, split, stratum, action,
    long_agreement / nullif(cohort, 0) as long_agreement,
    mismatch_after_agreement / nullif(cohort, 0) as mismatch_after_agreement
from internal.stratum_moments
