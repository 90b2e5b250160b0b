-- The units of every action's current revision, with the bytes of an index only if entries were ever removed. Earlier
-- versions charged 4 bytes an entry and KV head even if no entry was removed. These bytes are taken off here, so that
-- all units of an action have the same bytes. No entry is removed if prefill kept all n entries and a policy's m, if
-- there is a policy, is at least n + H - 1. The bytes are then those of n + H - 1 entries with a policy, else of n.
with

present as (
    select own.*, rules.policy, try_cast(rules.keep as bigint) as budget
    from stored.units as own
    anti join internal.superseded using (study, action, action_revision)
    left join stored.actions as rules using (study, action, action_revision)
),

counted as (
    select
        *,
        case
            when kept_entries is distinct from prompt_entries then null
            when policy is null then prompt_entries
            when budget >= prompt_entries + horizon - 1 then prompt_entries + horizon - 1
        end as never_removed_from
    from present
)

select
    * exclude (policy, budget, never_removed_from)
    replace (
        case when never_removed_from is null or index_bytes is null then index_bytes else 0 end as index_bytes,
        resident_bytes - case
            when never_removed_from is null then 0
            else coalesce(index_bytes // never_removed_from * prompt_entries, 0)
        end as resident_bytes
    )
from counted
