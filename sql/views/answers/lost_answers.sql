-- The answers that X states and Y does not, one row per answer of a coupled pair, with the kept share of their records.
-- As in scoring, an answer is searched in the text up to EOS. White space is ignored, and for "normalized" ASCII
-- punctuation and articles are too: articles may stand between the words of an answer. A word without punctuation has
-- no character that is special in a pattern.
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
        coalesce(scoring = 'normalized', false) as normalized,
        unnest([
            case
                when normalized then array_to_string(list_filter(
                    regexp_split_to_array(regexp_replace(lower(text), '[!-/:-@\[-`{-~]', '', 'g'), '\s+'),
                    lambda word: word not in ('', 'a', 'an', 'the')
                ), '(?:a|an|the)*')
                else regexp_replace(lower(text), '\s', '', 'g')
            end
            for text in answers
        ]) as wanted
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
),

stated as (
    select
        study, model, split, stratum, doc, action, replicate, answer,
        case
            when normalized then regexp_matches(regexp_replace(x_text, '[!-/:-@\[-`{-~]', '', 'g'), wanted)
            else contains(x_text, wanted)
        end as by_x,
        case
            when normalized then regexp_matches(regexp_replace(y_text, '[!-/:-@\[-`{-~]', '', 'g'), wanted)
            else contains(y_text, wanted)
        end as by_y
    from texts
    inner join answers using (study, model, doc)
)

select
    study, model, split, stratum, doc, action, replicate,
    cast(answer as integer) as answer,
    records.kept
from stated
left join main.answer_records as records using (study, model, split, stratum, doc, action, answer)
where by_x and not coalesce(by_y, false)
