-- Estimates with intervals: of every quantity the row made from the newest events; older ones stay in results. None is of
-- units, answers or clusters that a later revision superseded, and none was made under a plan that a later revision
-- superseded.
select
    study, model, split, stratum, baseline, action, quantity, x,
    estimate, low, high, level, draws, documents, clusters, interval, family, status, events_version, plan_sha256,
    estimate_reduced, low_reduced, high_reduced
from internal.results
qualify row_number() over (
    partition by study, model, split, stratum, baseline, action, quantity, x
    order by events_version desc
) = 1
