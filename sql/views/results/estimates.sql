-- Estimates with intervals: for every quantity the row made from the newest events. Older rows stay in table results.
-- Rows made from superseded units, answers or clusters, or under a superseded plan, are left out.
select
    study, model, split, stratum, baseline, action, quantity, x,
    estimate, low, high, level, draws, documents, clusters, interval, family, status, events_version, plan_sha256,
    estimate_reduced, low_reduced, high_reduced
from internal.results
qualify row_number() over (
    partition by study, model, split, stratum, baseline, action, quantity, x
    order by events_version desc
) = 1
