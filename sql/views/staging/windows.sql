-- The windows of each study and model: horizon H, cohort bound T, early and late lags, blocks, run length, threshold.
-- A study that has a row in studies keeps its own. Otherwise (events that another generator made) H is the longest
-- horizon of its complete trajectories, and the windows are the defaults: halves, quarters and eighths of H as floors.
-- A window whose last position lies below its first is empty.
with

studies as (select * from main.studies),

undeclared as (select distinct study, model from main.documents anti join studies using (study, model)),

observed as (
    select study, model, max(horizon) as horizon
    from main.trajectories
    semi join undeclared using (study, model)
    where complete
    group by study, model
)

select
    study, model, horizon, cohort_bound, early_last, late_first,
    first_block_last, second_block_last, agreement_run, saturation_threshold
from studies
union all by name
select
    study, model, horizon,
    horizon // 2 as cohort_bound,
    horizon // 8 as early_last,
    horizon // 2 - horizon // 8 + 1 as late_first,
    horizon // 4 as first_block_last,
    horizon // 2 as second_block_last,
    16 as agreement_run,
    cast(0.99 as double) as saturation_threshold
from observed
