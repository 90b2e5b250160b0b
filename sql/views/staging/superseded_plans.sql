-- The revisions of plans that a later revision supersedes. No other view shows estimates made under them.
select
    study,
    model,
    plan_sha256,
    plan_revision
from stored.plans
qualify plan_revision < max(plan_revision) over (partition by study, model)
