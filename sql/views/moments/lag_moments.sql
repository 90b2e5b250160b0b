-- Replicate means at each lag of the branch clock, one row per document, action and lag 1..T. The denominator is all
-- replicates, in the cohort tau <= T or not; a document without a member has zeros. tau + j never passes 2T <= H.
with

trajectories as (
    select * from main.analyzed_trajectories
),

steps as (
    select * from main.steps
),

windows as (
    select * from main.windows
),

documents as (
    select
        study,
        model,
        split,
        stratum,
        cluster,
        doc,
        action,
        count(*) as replicates,
        count(*) filter (where in_cohort) as cohort_paths
    from trajectories
    group by study, model, split, stratum, cluster, doc, action
),

lags as (
    select
        documents.*,
        unnest(range(1, windows.cohort_bound + 1)) as lag
    from documents
    inner join windows using (study, model)
),

sums as (
    select
        steps.study,
        steps.model,
        steps.doc,
        steps.action,
        steps.lag,
        sum(steps.delta) as delta,
        sum(steps.mismatch) as mismatch,
        count(*) filter (where steps.eos_set = 0) as pre_eos
    from steps
    inner join trajectories using (study, model, doc, action, replicate)
    where trajectories.in_cohort and steps.lag >= 1
    group by steps.study, steps.model, steps.doc, steps.action, steps.lag
)

select
    lags.study,
    lags.model,
    lags.split,
    lags.stratum,
    lags.cluster,
    lags.doc,
    lags.action,
    cast(lags.lag as integer) as lag,
    lags.replicates,
    lags.cohort_paths,
    lags.cohort_paths / lags.replicates as cohort,
    coalesce(sums.delta, 0) / lags.replicates as cohort_delta,
    coalesce(sums.mismatch, 0) / lags.replicates as cohort_mismatch,
    coalesce(sums.pre_eos, 0) / lags.replicates as cohort_pre_eos
from lags
left join sums using (study, model, doc, action, lag)
