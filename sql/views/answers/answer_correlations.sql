-- Whether actions that diverge more also lose more right answers: correlations with R over the actions of a study,
-- without controls, on the documents with answers. Fewer than three actions give null.
with

documents as (
    select
        study, model, split, stratum, doc, action, own.mismatch, answers.lost,
        answers.compressed_score - answers.reference_score as score_gap
    from main.document_answers as answers
    inner join (select study, model, doc, action, mismatch from main.moments) as own using (study, model, doc, action)
    anti join (select study, action from main.actions where control) as controls using (study, action)
),

strata as (
    select
        study, model, split, stratum, action,
        avg(mismatch) as mismatch, avg(lost) as lost, avg(score_gap) as score_gap
    from documents
    group by study, model, split, stratum, action
),

actions as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action,
        avg(mismatch) as mismatch, avg(lost) as lost, avg(score_gap) as score_gap
    from strata
    group by study, model, split, rollup (stratum), action
)

select
    study, model, split, stratum,
    count(*) as actions,
    case
        when count(*) >= 3 and least(stddev_pop(mismatch), stddev_pop(lost)) > 1e-12 then corr(mismatch, lost)
    end as lost,
    case
        when count(*) >= 3 and least(stddev_pop(mismatch), stddev_pop(score_gap)) > 1e-12
            then corr(mismatch, score_gap)
    end as score_gap
from actions
group by study, model, split, stratum
