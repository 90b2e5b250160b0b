-- The waiting documents in batches of some 8 million steps: each is a commit, so that memory is bounded and a kill
-- costs one of them.
with

sizes as (
    select study, model, doc, action, sum(horizon) as steps
    from main.trajectories
    semi join computed.waiting using (study, model, doc, action)
    group by study, model, doc, action
)

select
    study, model, doc, action, steps,
    (sum(steps) over (order by study, model, doc, action) - steps) // (1 << 23) as batch
from sizes
