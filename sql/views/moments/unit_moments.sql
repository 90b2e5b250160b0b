-- The moments of each unit, if replicates of the unit enter. Units of documents that have no row in documents are
-- included; the views that read this view leave such units out. Moments of a unit that was derived before its study was
-- declared, with other windows, are refused. A study that was never declared has the windows of its longest horizon, as
-- in windows.
with

enter as (
    select own.*
    from stored.unit_moments as own
    anti join internal.superseded using (study, action, action_revision)
    where replicates > 0
),

longest as (select study, model, max(horizon) as horizon from enter group by study, model)

select enter.*
from enter
inner join longest using (study, model)
left join stored.studies as declared using (study, model)
where case
    when declared.study is null then enter.horizon = longest.horizon
    when (enter.horizon, enter.cohort_bound, enter.early_last, enter.late_first, enter.first_block_last,
            enter.second_block_last, enter.agreement_run, enter.saturation_threshold)
        = (declared.horizon, declared.cohort_bound, declared.early_last, declared.late_first,
            declared.first_block_last, declared.second_block_last, declared.agreement_run,
            declared.saturation_threshold)
        then true
    else error(
        'study ''' || enter.study || ''' was declared after its units were derived, with other windows: '
        || 'kvdrift verify STORE --repair makes their moments again'
    )
end
