-- Replicate means at each lag of the branch clock, one row per document, action and lag 1..T. The denominator is all
-- replicates, in the cohort tau <= T or not; a document without a member has zeros. tau + j never passes 2T <= H.
with

trajectories as (select * from main.analyzed_trajectories),

documents as (
    select
        study, model, split, stratum, cluster, doc, action,
        count(*) as replicates,
        count(*) filter (where in_cohort) as cohort_paths
    from trajectories
    group by study, model, split, stratum, cluster, doc, action
),

lags as (
    select documents.*, unnest(range(1, windows.cohort_bound + 1)) as lag
    from documents
    inner join main.windows using (study, model)
),

sums as (
    select
        study, model, doc, action, lag,
        sum(delta) as delta,
        sum(steps.mismatch) as mismatch,
        count(*) filter (where eos_set = 0) as pre_eos
    from main.steps
    inner join trajectories using (study, model, doc, action, replicate)
    where in_cohort and lag >= 1
    group by study, model, doc, action, lag
)

select
    study, model, split, stratum, cluster, doc, action,
    cast(lag as integer) as lag,
    replicates,
    cohort_paths,
    cohort_paths / replicates as cohort,
    coalesce(delta, 0) / replicates as cohort_delta,
    coalesce(mismatch, 0) / replicates as cohort_mismatch,
    coalesce(pre_eos, 0) / replicates as cohort_pre_eos
from lags
left join sums using (study, model, doc, action, lag)
