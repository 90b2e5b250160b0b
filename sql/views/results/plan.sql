-- The newest revisions of frozen plans as rows: one per leaf of the plan's JSON, with its path as key and its text as
-- value. The frozen documents are left out, since table documents has them.
-- json_tree needs a DuckDB client from 1.3 on; the other views of the catalogue need 1.0.
with

newest as (
    select *
    from internal.plans
    anti join internal.superseded_plans using (study, model, plan_sha256)
)

select
    newest.study,
    newest.model,
    substr(leaves.fullkey, 3) as key,
    leaves.atom ->> '$' as value,
    newest.plan_sha256,
    newest.frozen_at,
    newest.events_version,
    newest.plan_revision
from newest, json_tree(newest.plan) as leaves
where leaves.type not in ('OBJECT', 'ARRAY') and not starts_with(leaves.fullkey, '$.documents.')
