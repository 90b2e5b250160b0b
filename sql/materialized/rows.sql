-- New rows of the table document_moments: what the views of moments compute for waiting documents.
with

revisions as (
    select study, model, doc, action, any_value(action_revision) as action_revision
    from main.trajectories
    semi join computed.waiting using (study, model, doc, action)
    group by study, model, doc, action
),

positions as (
    select
        study, model, doc, action,
        list(delta order by t) as position_delta,
        list(f order by t) as position_f,
        list(mismatch order by t) as position_mismatch,
        list(first_mismatch order by t) as position_first_mismatch
    from computed.position_moments
    group by study, model, doc, action
),

lags as (
    select
        study, model, doc, action,
        any_value(cohort_paths) as cohort_paths,
        list(cohort_delta order by lag) as lag_cohort_delta,
        list(cohort_mismatch order by lag) as lag_cohort_mismatch,
        list(cohort_pre_eos order by lag) as lag_cohort_pre_eos
    from computed.lag_moments
    group by study, model, doc, action
),

depths as (
    select
        study, model, doc, action,
        list(observed order by depth) as depth_observed,
        list(capacity order by depth) as depth_capacity
    from computed.depth_moments
    group by study, model, doc, action
)

select
    study, model, doc, action, action_revision,
    cast(replicates as integer) as replicates,
    mismatch as scalar_mismatch,
    rollout_tv as scalar_rollout_tv,
    fixed_history_tv as scalar_fixed_history_tv,
    diverged as scalar_diverged,
    entry as scalar_entry,
    exposure as scalar_exposure,
    occupation as scalar_occupation,
    saturation as scalar_saturation,
    eos_gap_0 as scalar_eos_gap_0,
    eos_gap_1 as scalar_eos_gap_1,
    eos_gap_2 as scalar_eos_gap_2,
    eos_gap_3 as scalar_eos_gap_3,
    cohort as scalar_cohort,
    early_delta as scalar_early_delta,
    late_delta as scalar_late_delta,
    early_pre_eos_steps as scalar_early_pre_eos_steps,
    early_pre_eos_delta as scalar_early_pre_eos_delta,
    late_pre_eos_steps as scalar_late_pre_eos_steps,
    late_pre_eos_delta as scalar_late_pre_eos_delta,
    long_agreement as scalar_long_agreement,
    mismatch_after_agreement as scalar_mismatch_after_agreement,
    block_1_delta as scalar_block_1_delta,
    block_2_delta as scalar_block_2_delta,
    block_3_delta as scalar_block_3_delta,
    block_1_f as scalar_block_1_f,
    block_2_f as scalar_block_2_f,
    block_3_f as scalar_block_3_f,
    block_1_mismatch as scalar_block_1_mismatch,
    block_2_mismatch as scalar_block_2_mismatch,
    block_3_mismatch as scalar_block_3_mismatch,
    prefix_mismatch as scalar_prefix_mismatch,
    prefix_diverged as scalar_prefix_diverged,
    prefix_eos_x as scalar_prefix_eos_x,
    prefix_eos_y as scalar_prefix_eos_y,
    position_delta, position_f, position_mismatch, position_first_mismatch,
    cohort_paths, lag_cohort_delta, lag_cohort_mismatch, lag_cohort_pre_eos,
    depth_observed, depth_capacity,
    occupation_compensator as scalar_occupation_compensator,
    exposure_compensator as scalar_exposure_compensator,
    written as scalar_written,
    written_exposure as scalar_written_exposure,
    units_digest, definition
from computed.moments
inner join revisions using (study, model, doc, action)
inner join positions using (study, model, doc, action)
inner join depths using (study, model, doc, action)
inner join lags using (study, model, doc, action)
inner join stored.batches using (study, model, doc, action)
order by study, model, doc, action
