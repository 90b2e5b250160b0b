-- Staging: the stored table as it is, one estimate with its interval.
select
    study,
    model,
    split,
    stratum,
    action,
    baseline,
    quantity,
    x,
    estimate,
    low,
    high,
    level,
    draws,
    documents,
    family,
    status,
    events_version,
    plan_sha256
from stored.results
