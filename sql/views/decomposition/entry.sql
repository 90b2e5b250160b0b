-- The distribution of the first mismatch: p_t = P(tau = t), its sums, survival S_t = P(tau >= t) and hazard.
-- Each document's trajectories are counted as integers before the mean, so that a survival of 0 is exactly 0.
with

trajectories as (select * from main.analyzed_trajectories),

documents as (
    select
        study, model, split, stratum, doc, action,
        any_value(horizon) as horizon,
        count(*) as replicates
    from trajectories
    group by study, model, split, stratum, doc, action
),

entries as (
    select study, model, doc, action, tau as t, count(*) as entered
    from trajectories
    where tau is not null
    group by study, model, doc, action, tau
),

positions as (
    select * exclude (horizon), unnest(range(1, horizon + 1)) as t
    from documents
),

counts as (
    select
        positions.*,
        coalesce(entries.entered, 0) as entered,
        sum(coalesce(entries.entered, 0)) over (
            partition by positions.study, positions.model, positions.doc, positions.action
            order by positions.t
        ) as entered_so_far
    from positions
    left join entries using (study, model, doc, action, t)
),

document_profiles as (
    select
        study, model, split, stratum, action,
        cast(t as integer) as t,
        entered / replicates as p,
        entered_so_far / replicates as entry_cdf,
        (replicates - entered_so_far + entered) / replicates as survival
    from counts
),

strata as (
    select
        study, model, split, stratum, action, t,
        avg(columns(* exclude (study, model, split, stratum, action, t)))
    from document_profiles
    group by study, model, split, stratum, action, t
),

profiles as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action, t,
        avg(columns(* exclude (study, model, split, stratum, action, t)))
    from strata
    group by study, model, split, rollup (stratum), action, t
)

select *, p / nullif(survival, 0) as hazard
from profiles
