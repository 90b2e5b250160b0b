-- The decomposition R = O + E C of every action, with the fixed-history and rollout distances.
select
    study, model, split, stratum, action, documents, trajectories, mismatch, rollout_tv, fixed_history_tv,
    diverged / horizon as occurrence,
    exposure,
    occupation,
    coalesce(occupation / nullif(exposure, 0), 0) as mismatch_rate,
    diverged as divergence_probability,
    1 - diverged as never_diverge,
    entry / nullif(diverged, 0) as mean_entry,
    written,
    mismatch / written as mismatch_written,
    written_exposure / written as exposure_written
from internal.stratum_moments
inner join main.windows using (study, model)
