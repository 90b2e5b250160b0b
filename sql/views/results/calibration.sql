-- Of every predictor of a contrast, the row made from the newest events. The stored table keeps the older rows.
select *
from stored.calibration
qualify row_number() over (
    partition by study, model, action, baseline, observation, candidate
    order by events_version desc
) = 1
