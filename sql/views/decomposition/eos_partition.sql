-- The history gap R(TV) - F split by position: before the first EOS (0), at the first EOS (1), after it through the
-- later EOS (2), after both (3). The four gaps sum to rollout_tv - fixed_history_tv.
select
    study, model, split, stratum, action,
    unnest([0, 1, 2, 3]) as eos_set,
    unnest([eos_gap_0, eos_gap_1, eos_gap_2, eos_gap_3]) as gap
from internal.stratum_moments
