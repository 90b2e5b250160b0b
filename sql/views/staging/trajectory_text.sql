-- The text of both continuations of a coupled pair, up to their EOS. A continuation with a token without text is null.
with

positions as (
    select
        events.study, events.model, events.doc, events.action, events.replicate, events.t,
        case when events.x_eos then '' else x.text end as x_text,
        case when events.y_eos then '' else y.text end as y_text
    from main.events as events
    left join main.tokens as x on events.study = x.study and events.model = x.model and events.x_token = x.token
    left join main.tokens as y on events.study = y.study and events.model = y.model and events.y_token = y.token
    where events.kind = 'coupled'
)

select
    study, model, doc, action, replicate,
    case when count(x_text) = count(*) then string_agg(x_text, '' order by t) end as x_text,
    case when count(y_text) = count(*) then string_agg(y_text, '' order by t) end as y_text
from positions
group by study, model, doc, action, replicate
