-- The history of every action: for each revision how its units were made, and the number of its units.
with

counts as (
    select
        study,
        model,
        action,
        action_revision,
        count(*) as units
    from stored.units
    group by study, model, action, action_revision
),

identities as (
    select * from stored.identities
),

actions as (
    select * from stored.actions
),

superseded as (
    select
        *,
        true as superseded
    from internal.superseded
)

select
    study,
    model,
    action,
    action_revision,
    superseded is null as current,
    coalesce(counts.units, 0) as units,
    actions.selector,
    actions.keep,
    actions.parameters,
    actions.codec,
    actions.codec_parameters,
    actions.policy,
    actions.policy_parameters,
    identities.weights_sha256,
    identities.tokenizer_sha256,
    identities.selector_sha256,
    identities.numerics,
    identities.eos_tokens
from counts
full join identities using (study, model, action, action_revision)
left join actions using (study, action, action_revision)
left join superseded using (study, action, action_revision)
