-- Staging: the stored table as it is, the frozen plan of a study's evaluation.
select
    study,
    model,
    plan_sha256,
    frozen_at,
    events_version,
    plan
from stored.plans
