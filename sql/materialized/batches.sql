-- The waiting documents in batches of some 8 million steps, with the files that have them: each batch is a commit, so
-- that memory is bounded and a kill costs one of them. A file is alone in holding one document under one action.
with

held as (
    select *, count(*) over (partition by path) = 1 as alone
    from stored.held
),

present as (
    select *
    from held
    semi join computed.waiting using (study, model, doc, action)
    anti join internal.superseded using (study, action, action_revision)
),

sizes as (
    select study, model, doc, action, sum(steps) as steps
    from present
    group by study, model, doc, action
),

numbered as (
    select
        study, model, doc, action,
        cast(sum(steps) over (order by study, model, doc, action) - steps as bigint) // (1 << 23) as batch
    from sizes
)

select study, model, doc, action, path, alone, cast(present.steps as bigint) as steps, batch
from present
inner join numbered using (study, model, doc, action)
