-- Replicate means at each lag of the branch clock, one row per document, action and lag 1..T. The denominator is all
-- replicates, in the cohort tau <= T or not; a document without a member has zeros. tau + j never passes 2T <= H.
with

profiles as (
    select
        study, model, doc, action, replicates, scalar_cohort,
        unnest(range(1, cohort_bound + 1)) as lag,
        unnest(lag_cohort_delta) as delta,
        unnest(lag_cohort_mismatch) as mismatch,
        unnest(lag_cohort_pre_eos) as pre_eos
    from internal.unit_moments
),

sums as (
    select
        study, model, doc, action, lag,
        cast(sum(replicates) as bigint) as replicates,
        cast(sum(scalar_cohort) as bigint) as cohort_paths,
        sum(delta) as delta,
        sum(mismatch) as mismatch,
        sum(pre_eos) as pre_eos
    from profiles
    group by study, model, doc, action, lag
)

select
    study, model, split, stratum, cluster, doc, action,
    cast(lag as integer) as lag,
    replicates,
    cohort_paths,
    cohort_paths / replicates as cohort,
    delta / replicates as cohort_delta,
    mismatch / replicates as cohort_mismatch,
    pre_eos / replicates as cohort_pre_eos
from sums
inner join main.documents using (study, model, doc)
