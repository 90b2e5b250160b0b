-- The decomposition R = O + E C of every action, with the fixed-history and rollout distances.
with

stratum_moments as (
    select * from main.stratum_moments
),

windows as (
    select * from main.windows
)

select
    stratum_moments.study,
    stratum_moments.model,
    stratum_moments.split,
    stratum_moments.stratum,
    stratum_moments.action,
    stratum_moments.documents,
    stratum_moments.trajectories,
    stratum_moments.mismatch,
    stratum_moments.rollout_tv,
    stratum_moments.fixed_history_tv,
    stratum_moments.diverged / windows.horizon as occurrence,
    stratum_moments.exposure,
    stratum_moments.occupation,
    coalesce(stratum_moments.occupation / nullif(stratum_moments.exposure, 0), 0) as mismatch_rate,
    stratum_moments.diverged as divergence_probability,
    stratum_moments.entry / nullif(stratum_moments.diverged, 0) as mean_entry
from stratum_moments
inner join windows using (study, model)
