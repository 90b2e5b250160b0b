-- The revisions of actions whose events no other view shows: all below the action's highest revision, and the highest
-- revision if the action was dropped.
with

newest as (
    select
        study,
        action,
        max(action_revision) as action_revision,
        arg_max(dropped, action_revision) as dropped
    from stored.actions
    group by study, action
)

select
    study,
    action,
    cast(unnest(range(action_revision + cast(dropped as integer))) as integer) as action_revision
from newest
