-- Replicate means of every moment, one row per document and action: documents are the statistical unit, and everything
-- below and all resampling is built from these rows.
with

sums as (
    select
        study, model, doc, action,
        cast(sum(replicates) as bigint) as replicates,
        sum(columns(* exclude (
            study, model, doc, action, action_revision, unit, horizon, cohort_bound, early_last, late_first,
            first_block_last, second_block_last, agreement_run, saturation_threshold, replicates,
            position_delta, position_f, position_mismatch, position_first_mismatch,
            lag_cohort_delta, lag_cohort_mismatch, lag_cohort_pre_eos, depth_observed, depth_capacity
        )))
    from internal.unit_moments
    group by study, model, doc, action
),

means as (
    select
        study, model, doc, action, replicates,
        columns(* exclude (study, model, doc, action, replicates)) / replicates
    from sums
)

select
    study, model, split, stratum, cluster, doc, action,
    means.* exclude (study, model, doc, action)
from means
inner join main.documents using (study, model, doc)
