-- The interim looks of sequential studies: every primary endpoint at every interim look, under the newest plan.
select
    study, model, 'evaluation' as split, stratum, baseline, action, look, quantity, documents, clusters,
    estimate, low, high, resolved, level, constant, draws, interval, events_version, plan_sha256
from internal.looks
