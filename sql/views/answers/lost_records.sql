-- How many answers have a record that is gone, partly kept or whole, among lost answers and among all answers of the
-- documents. An answer is lost if X states it and Y does not. Every answer counts once, and every lost answer once a
-- pair.
with

records as (
    select
        study, model, split, stratum, action,
        count(*) as answers,
        count(*) filter (where kept = 0) as gone,
        count(*) filter (where kept > 0 and kept < 1) as partly
    from main.answer_records
    group by study, model, split, stratum, action
),

losses as (
    select
        study, model, split, stratum, action,
        count(*) as lost,
        count(*) filter (where kept = 0) as lost_gone,
        count(*) filter (where kept > 0 and kept < 1) as lost_partly
    from main.lost_answers
    where kept is not null
    group by study, model, split, stratum, action
),

strata as (
    select
        study, model, split, stratum, action, answers, gone, partly,
        coalesce(lost, 0) as lost, coalesce(lost_gone, 0) as lost_gone, coalesce(lost_partly, 0) as lost_partly
    from records
    left join losses using (study, model, split, stratum, action)
),

pooled as (
    select
        study, model, split, coalesce(stratum, 'pooled') as stratum, action,
        sum(columns(* exclude (study, model, split, stratum, action)))
    from strata
    group by study, model, split, rollup (stratum), action
)

select
    study, model, split, stratum, action,
    cast(answers as bigint) as answers,
    gone / answers as gone,
    partly / answers as partly,
    1 - (gone + partly) / answers as whole,
    cast(lost as bigint) as lost,
    lost_gone / nullif(lost, 0) as lost_gone,
    lost_partly / nullif(lost, 0) as lost_partly,
    1 - (lost_gone + lost_partly) / nullif(lost, 0) as lost_whole
from pooled
