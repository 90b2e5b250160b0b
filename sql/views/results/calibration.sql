-- For every predictor of a contrast, the row made from the newest events of current revisions and the newest revision
-- of the documents, under the newest plan. The stored table keeps the older rows.
select own.*
from stored.calibration as own
anti join internal.superseded as actions
    on own.study = actions.study and own.action = actions.action and own.action_revision = actions.action_revision
anti join internal.superseded as baselines
    on own.study = baselines.study
        and own.baseline = baselines.action
        and own.baseline_revision = baselines.action_revision
anti join internal.superseded_plans as plans
    on own.study = plans.study and own.model = plans.model and own.plan_sha256 = plans.plan_sha256
anti join internal.superseded_analyses as analyses
    on own.study = analyses.study
        and own.model = analyses.model
        and own.documents_revision = analyses.documents_revision
qualify row_number() over (
    partition by study, model, action, baseline, observation, candidate
    order by events_version desc
) = 1
