-- The distribution of a branch by its start s: p_s = P(tau = s) and rho_{s,j} = P(I_{s+j} = 1 | tau = s), one row for
-- each s at which some trajectory diverges and each lag j = 0..H - s.
-- Every trajectory carries its pooling weight, so that steps is read and summed once, without a row per document.
with

trajectories as (select * from main.analyzed_trajectories),

documents as materialized (
    select study, model, split, stratum, doc, action, count(*) as replicates
    from trajectories
    group by study, model, split, stratum, doc, action
),

strata as (
    select study, model, split, stratum, action, count(*) as documents
    from documents
    group by study, model, split, stratum, action
),

weights as (
    select study, model, doc, action, 1 / (replicates * documents) as weight
    from documents
    inner join strata using (study, model, split, stratum, action)
),

stratum_profile as materialized (
    select
        study, model, split, stratum, action,
        t - lag as s,
        lag as j,
        sum(weight) as p,
        sum(weight * mismatch) as mismatch
    from main.steps
    inner join trajectories using (study, model, doc, action, replicate)
    inner join weights using (study, model, doc, action)
    where lag >= 0
    group by study, model, split, stratum, action, t - lag, lag
),

stratum_counts as (
    select study, model, split, action, count(*) as strata
    from strata
    group by study, model, split, action
),

pooled_profile as (
    -- A stratum without an entry at s has no row there: the mean divides by all the action's strata.
    select
        study, model, split, 'pooled' as stratum, action, s, j,
        sum(p) / any_value(strata) as p,
        sum(mismatch) / any_value(strata) as mismatch
    from stratum_profile
    inner join stratum_counts using (study, model, split, action)
    group by study, model, split, action, s, j
),

profiles as (
    select * from stratum_profile
    union all by name
    select * from pooled_profile
)

select * exclude (mismatch), mismatch / p as rho
from profiles
