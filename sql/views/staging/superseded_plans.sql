-- The revisions of plans that a later one supersedes. What was estimated under them is in no other view.
select
    study,
    model,
    plan_sha256,
    plan_revision
from stored.plans
qualify plan_revision < max(plan_revision) over (partition by study, model)
