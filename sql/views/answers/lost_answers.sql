-- The answers that X states and Y does not, one row per answer of a coupled pair, with the kept share of their records.
-- As in scoring, an answer is searched in the text up to EOS, and white space is ignored.
with

pairs as (
    select study, model, split, stratum, doc, action, replicate
    from main.analyzed_trajectories
    inner join main.scores using (study, model, doc, action, replicate)
    where score_x > 0 and score_y < 1
),

answers as (
    select
        study, model, doc,
        unnest(range(len(answers))) as answer,
        unnest([regexp_replace(lower(text), '\s', '', 'g') for text in answers]) as wanted
    from main.documents
),

tokens as (
    select study, model, token, regexp_replace(lower(text), '\s', '', 'g') as text from main.tokens
),

texts as (
    select
        study, model, pairs.split, pairs.stratum, doc, action, replicate,
        string_agg(x.text, '' order by events.t) filter (where not events.x_eos) as x_text,
        string_agg(y.text, '' order by events.t) filter (where not events.y_eos) as y_text
    from main.events as events
    inner join pairs using (study, model, doc, action, replicate)
    left join tokens as x on events.study = x.study and events.model = x.model and events.x_token = x.token
    left join tokens as y on events.study = y.study and events.model = y.model and events.y_token = y.token
    where events.kind = 'coupled'
    group by study, model, pairs.split, pairs.stratum, doc, action, replicate
)

select
    study, model, split, stratum, doc, action, replicate,
    cast(answer as integer) as answer,
    records.kept
from texts
inner join answers using (study, model, doc)
left join main.answer_records as records using (study, model, split, stratum, doc, action, answer)
where contains(x_text, wanted) and not contains(coalesce(y_text, ''), wanted)
