-- The first view to query: one row for each action of a study and model, over its evaluation documents with all strata
-- pooled. No filter is needed. The interval of R comes from estimates if the estimate was made from the same events.
-- Otherwise the status is 'outdated', and the row has no interval.
with

measured as (
    select
        *,
        trajectories / documents as replicates
    from main.frontier
    where split = 'evaluation' and stratum = 'pooled'
),

texts as (
    select study, model, action, written, mismatch_written, exposure_written
    from main.decomposition
    where split = 'evaluation' and stratum = 'pooled'
),

references_answered as (
    select study, model, action, accuracy_reference
    from main.answers
    where split = 'evaluation' and stratum = 'pooled'
),

intervals as (
    select study, model, action, documents as estimated_documents, estimate, low, high, level, status
    from main.estimates
    where
        split = 'evaluation' and stratum = 'pooled' and quantity = 'mismatch' and baseline is null and x is null
),

judged as (
    select
        *,
        estimated_documents = documents and abs(estimate - mismatch) < 1e-9 as current
    from measured
    left join intervals using (study, model, action)
)

select
    study, model, action, control, cache_share, cache_bytes, mismatch,
    case when current then low end as mismatch_low,
    case when current then high end as mismatch_high,
    case when current then level end as level,
    case when estimated_documents is null then null when current then status else 'outdated' end as status,
    divergence_probability, mean_entry, exposure, written, mismatch_written, exposure_written,
    accuracy_reference, accuracy, documents, replicates, horizon
from judged
inner join texts using (study, model, action)
inner join (select study, model, horizon from main.windows) as windows using (study, model)
left join references_answered using (study, model, action)
left join (select study, action, control from main.actions) as actions using (study, action)
order by study, model, mismatch, action
