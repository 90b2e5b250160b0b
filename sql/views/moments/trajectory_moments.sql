-- The additive per-replicate moments, one row per analyzed trajectory (trajectories of documents that have no row in
-- documents have neither split nor stratum and are left out, here and in all views below).
-- steps is read once: what its rows add is summed by trajectory first, and documents are joined afterwards.
with

trajectories as (select * from main.analyzed_trajectories),

windows as (select * from main.windows),

placed as (
    -- Every step with its windows: t - lag is tau, and a null lag is in no lag window.
    select
        study, model, doc, action, replicate, mismatch, eos_set,
        cast(steps.delta as double) as delta,
        cast(steps.f as double) as f,
        steps.delta > saturation_threshold as saturated,
        t <= first_block_last as in_block_1,
        t > first_block_last and t <= second_block_last as in_block_2,
        t > second_block_last as in_block_3,
        lag >= 1 as after_entry,
        horizon - t as remaining,
        t - lag <= cohort_bound and lag between 1 and early_last as early,
        t - lag <= cohort_bound and lag between late_first and cohort_bound as late
    from main.steps
    inner join windows using (study, model)
),

sums as (
    select
        study, model, doc, action, replicate,
        sum(case when saturated then 1 else 0 end) as saturated_steps,
        sum(case when eos_set = 0 then delta - f else 0 end) as gap_0,
        sum(case when eos_set = 1 then delta - f else 0 end) as gap_1,
        sum(case when eos_set = 2 then delta - f else 0 end) as gap_2,
        sum(case when eos_set = 3 then delta - f else 0 end) as gap_3,
        sum(case when early then delta else 0 end) as early_delta,
        sum(case when late then delta else 0 end) as late_delta,
        sum(case when early and eos_set = 0 then delta else 0 end) as early_pre_eos_delta,
        sum(case when late and eos_set = 0 then delta else 0 end) as late_pre_eos_delta,
        sum(case when in_block_1 then delta else 0 end) as block_1_delta,
        sum(case when in_block_2 then delta else 0 end) as block_2_delta,
        sum(case when in_block_3 then delta else 0 end) as block_3_delta,
        sum(case when in_block_1 then f else 0 end) as block_1_f,
        sum(case when in_block_2 then f else 0 end) as block_2_f,
        sum(case when in_block_3 then f else 0 end) as block_3_f,
        sum(case when in_block_1 then mismatch else 0 end) as block_1_mismatch,
        sum(case when in_block_2 then mismatch else 0 end) as block_2_mismatch,
        sum(case when in_block_3 then mismatch else 0 end) as block_3_mismatch,
        sum(case when after_entry then delta else 0 end) as delta_after_entry,
        sum(case when after_entry then 0 else remaining * delta end) as exposed_delta
    from placed
    group by study, model, doc, action, replicate
),

pre_eos as (
    -- The lags j < e - tau of each window, counted from its bounds: no step need be looked at.
    select
        study, model, doc, action, replicate,
        least(early_last, first_eos - tau - 1) as early_steps,
        least(cohort_bound, first_eos - tau - 1) - late_first + 1 as late_steps
    from trajectories
    inner join windows using (study, model)
    where in_cohort
),

lengths as (
    -- Window lengths; null where a window is empty, so that its mean is null.
    select
        study, model, agreement_run, first_block_last,
        nullif(greatest(early_last, 0), 0) as early,
        nullif(greatest(cohort_bound - late_first + 1, 0), 0) as late,
        nullif(first_block_last, 0) as block_1,
        nullif(second_block_last - first_block_last, 0) as block_2,
        nullif(horizon - second_block_last, 0) as block_3
    from windows
)

select
    study, model, split, stratum, cluster, doc, action, replicate,
    mismatches / horizon as mismatch,
    sum_delta / horizon as rollout_tv,
    sum_f / horizon as fixed_history_tv,
    cast(tau is not null as double) as diverged,
    cast(coalesce(tau, 0) as double) as entry,
    trajectories.exposure / horizon as exposure,
    trajectories.occupation / horizon as occupation,
    sums.saturated_steps / horizon as saturation,
    coalesce(sums.gap_0, 0) / horizon as eos_gap_0,
    coalesce(sums.gap_1, 0) / horizon as eos_gap_1,
    coalesce(sums.gap_2, 0) / horizon as eos_gap_2,
    coalesce(sums.gap_3, 0) / horizon as eos_gap_3,
    cast(in_cohort as double) as cohort,
    coalesce(sums.early_delta, 0) / lengths.early as early_delta,
    coalesce(sums.late_delta, 0) / lengths.late as late_delta,
    cast(greatest(coalesce(pre_eos.early_steps, 0), 0) as double) as early_pre_eos_steps,
    coalesce(sums.early_pre_eos_delta, 0) as early_pre_eos_delta,
    cast(greatest(coalesce(pre_eos.late_steps, 0), 0) as double) as late_pre_eos_steps,
    coalesce(sums.late_pre_eos_delta, 0) as late_pre_eos_delta,
    cast(in_cohort and coalesce(longest_agreement >= agreement_run, false) as double) as long_agreement,
    cast(in_cohort and coalesce(trajectories.mismatch_after_agreement, false) as double) as mismatch_after_agreement,
    sums.block_1_delta / lengths.block_1 as block_1_delta,
    sums.block_2_delta / lengths.block_2 as block_2_delta,
    sums.block_3_delta / lengths.block_3 as block_3_delta,
    sums.block_1_f / lengths.block_1 as block_1_f,
    sums.block_2_f / lengths.block_2 as block_2_f,
    sums.block_3_f / lengths.block_3 as block_3_f,
    sums.block_1_mismatch / lengths.block_1 as block_1_mismatch,
    sums.block_2_mismatch / lengths.block_2 as block_2_mismatch,
    sums.block_3_mismatch / lengths.block_3 as block_3_mismatch,
    coalesce(sums.block_1_mismatch, 0) / horizon as prefix_mismatch,
    cast(coalesce(tau <= lengths.first_block_last, false) as double) as prefix_diverged,
    cast(coalesce(eos_x <= lengths.first_block_last, false) as double) as prefix_eos_x,
    cast(coalesce(eos_y <= lengths.first_block_last, false) as double) as prefix_eos_y,
    coalesce(sums.delta_after_entry, 0) / horizon as occupation_compensator,
    coalesce(sums.exposed_delta, 0) / horizon as exposure_compensator,
    least(last_eos, horizon) / horizon as written,
    coalesce(least(last_eos, horizon) - tau, 0) / horizon as written_exposure
from trajectories
inner join sums using (study, model, doc, action, replicate)
left join pre_eos using (study, model, doc, action, replicate)
inner join lengths using (study, model)
