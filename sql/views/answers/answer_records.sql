-- The share of each answer's records that each action keeps. The share of a place is the mean over its positions and
-- over (layer, KV head) pairs. The share of a piece is that of its best kept place, and the share of an answer is that
-- of its least kept piece. With a decode-time policy the row of the last counted step counts. Answers whose records
-- were not found have no row.
with

documents as (
    select study, model, split, stratum, doc, document_revision from main.documents
),

prompts as (
    select study, model, split, stratum, doc, len(tokens) as entries, unnest(records) as place
    from main.prompts
    inner join documents using (study, model, doc, document_revision)
    where action is null
),

kept as (
    select study, model, doc, action, arg_max(kept, step) as kept, arg_max(pairs, step) as pairs
    from main.prompts
    where action is not null
    group by study, model, doc, action
),

places as (
    select
        study, model, split, stratum, doc, action, place.answer, place.piece, place.first, place.last,
        list_sum([
            list_sum(kept.kept[layers * entries + place.first:layers * entries + place.last])
            for layers in range(len(kept.kept) // entries)
        ]) / kept.pairs / (place.last - place.first + 1) as share
    from prompts
    inner join kept using (study, model, doc)
),

pieces as (
    select study, model, split, stratum, doc, action, answer, piece, count(*) as places, max(share) as share
    from places
    group by study, model, split, stratum, doc, action, answer, piece
)

select
    study, model, split, stratum, doc, action, answer,
    count(*) as pieces,
    cast(sum(places) as bigint) as places,
    min(share) as kept,
    avg(share) as kept_mean
from pieces
group by study, model, split, stratum, doc, action, answer
