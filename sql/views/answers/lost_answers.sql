-- The answers that X states and Y does not, one row per answer of a coupled pair, with what was kept of their records.
-- An answer is looked for in the text up to EOS, as it is scored, without regard to white space.
with

pairs as (
    select study, model, split, stratum, doc, action, replicate, score_x, score_y
    from main.analyzed_trajectories
    inner join main.scores using (study, model, doc, action, replicate)
    where score_x > score_y or (score_x > 0 and score_y < 1)
),

answers as (
    select
        study, model, doc,
        unnest(range(len(answers))) as answer,
        unnest([regexp_replace(lower(text), '\s', '', 'g') for text in answers]) as wanted
    from main.documents
),

texts as (
    select
        study, model, doc, action, replicate,
        regexp_replace(lower(x_text), '\s', '', 'g') as x_text,
        regexp_replace(lower(y_text), '\s', '', 'g') as y_text
    from main.trajectory_text
    semi join pairs using (study, model, doc, action, replicate)
)

select
    study, model, split, stratum, doc, action, replicate,
    cast(answer as integer) as answer,
    records.kept
from pairs
inner join texts using (study, model, doc, action, replicate)
inner join answers using (study, model, doc)
left join main.answer_records as records using (study, model, split, stratum, doc, action, answer)
where contains(x_text, wanted) and not contains(y_text, wanted)
