-- Frozen plans as rows: one per leaf of the plan's JSON, its path as key and its text as value.
-- (json_tree: DuckDB clients from 1.3 on; the other views of the catalogue from 1.0 on.)
select
    plans.study,
    plans.model,
    substr(leaves.fullkey, 3) as key,
    leaves.atom ->> '$' as value,
    plans.plan_sha256,
    plans.frozen_at,
    plans.events_version
from main.plans, json_tree(plans.plan) as leaves
where leaves.type not in ('OBJECT', 'ARRAY')
