-- The moments of each unit whose replicates enter: those made with the present windows of their study.
select own.*
from stored.unit_moments as own
semi join main.windows using (
    study, model, horizon, cohort_bound, early_last, late_first,
    first_block_last, second_block_last, agreement_run, saturation_threshold
)
anti join internal.superseded using (study, action, action_revision)
where replicates > 0
