-- The moments of each unit of a document that has a row in documents, if replicates of the unit enter. Moments of a unit
-- that was derived before its study was declared, with other windows, are refused.
with

windows as (
    select windows.*, studies.study is not null as declared
    from main.windows
    left join main.studies using (study, model)
),

enter as (
    select
        own.*,
        declared,
        (own.horizon, own.cohort_bound, own.early_last, own.late_first, own.first_block_last, own.second_block_last,
            own.agreement_run, own.saturation_threshold)
        = (windows.horizon, windows.cohort_bound, windows.early_last, windows.late_first, windows.first_block_last,
            windows.second_block_last, windows.agreement_run, windows.saturation_threshold) as of_windows
    from stored.unit_moments as own
    inner join windows using (study, model)
    semi join main.documents using (study, model, doc)
    anti join internal.superseded using (study, action, action_revision)
    where replicates > 0
)

select * exclude (declared, of_windows)
from enter
where case
    when of_windows then true
    when declared then error(
        'study ''' || study || ''' was declared after its units were derived, with other windows: '
        || 'kvdrift verify STORE --repair makes their moments again'
    )
    else false
end
