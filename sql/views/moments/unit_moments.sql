-- The moments of each unit of a document that has a row in documents, made with the present windows of its study.
select own.*
from stored.unit_moments as own
semi join main.windows using (
    study, model, horizon, cohort_bound, early_last, late_first,
    first_block_last, second_block_last, agreement_run, saturation_threshold
)
semi join main.documents using (study, model, doc)
anti join internal.superseded using (study, action, action_revision)
where replicates > 0
