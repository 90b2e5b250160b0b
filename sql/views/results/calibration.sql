-- Staging and the newest alone: of every predictor of a contrast the row made from the newest events. Older rows stay in
-- the stored table.
select
    study,
    model,
    action,
    baseline,
    observation,
    candidate,
    selected,
    cross_validated_mse,
    documents,
    gap,
    predicted_gap,
    error,
    low,
    high,
    level,
    margin,
    decision,
    mae,
    rmse,
    draws,
    status,
    events_version,
    plan_sha256
from stored.calibration
qualify row_number() over (
    partition by study, model, action, baseline, observation, candidate
    order by events_version desc
) = 1
