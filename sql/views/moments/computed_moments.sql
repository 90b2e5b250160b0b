-- The moments of the documents and actions in stored.waiting, from their steps, as rows of unit_moments: of a store that
-- was derived before its units had moments, until kvdrift derive makes these. A row sums all units, so it has none.
with

trajectories as (
    select * from main.analyzed_trajectories
    semi join stored.waiting using (study, model, doc, action)
),

revisions as (
    select study, model, doc, action, any_value(action_revision) as action_revision
    from main.trajectories
    semi join stored.waiting using (study, model, doc, action)
    group by study, model, doc, action
),

scalars as (
    select
        study, model, doc, action,
        cast(count(*) as integer) as replicates,
        sum(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicate))) as 'scalar_\0'
    from internal.trajectory_moments
    semi join stored.waiting using (study, model, doc, action)
    group by study, model, doc, action
),

steps as (
    select steps.*, in_cohort
    from main.steps
    inner join trajectories using (study, model, doc, action, replicate)
),

at_positions as (
    select
        study, model, doc, action, t,
        sum(delta) as delta,
        sum(f) as f,
        sum(mismatch) as mismatch,
        count(*) filter (where lag = 0) as first_mismatch
    from steps
    group by study, model, doc, action, t
),

positions as (
    select
        study, model, doc, action,
        list(delta order by t) as position_delta,
        list(f order by t) as position_f,
        list(cast(mismatch as double) order by t) as position_mismatch,
        list(cast(first_mismatch as double) order by t) as position_first_mismatch
    from at_positions
    group by study, model, doc, action
),

after_entry as (
    select
        study, model, doc, action, lag,
        sum(delta) filter (where in_cohort) as delta,
        sum(mismatch) filter (where in_cohort) as cohort_mismatch,
        count(*) filter (where in_cohort and eos_set = 0) as pre_eos,
        sum(mismatch) as mismatch,
        count(*) as branches
    from steps
    where lag >= 0
    group by study, model, doc, action, lag
),

lags as (
    -- Every lag of every document: 0..H - 1, of which 1..T are those of the branch clock.
    select scalars.study, scalars.model, doc, action, horizon, cohort_bound, unnest(range(horizon)) as lag
    from scalars
    inner join main.windows using (study, model)
),

branches as (
    select
        study, model, doc, action,
        list(coalesce(delta, 0) order by lag) filter (where lag between 1 and cohort_bound) as lag_cohort_delta,
        list(coalesce(cast(cohort_mismatch as double), 0) order by lag)
            filter (where lag between 1 and cohort_bound) as lag_cohort_mismatch,
        list(coalesce(cast(pre_eos as double), 0) order by lag)
            filter (where lag between 1 and cohort_bound) as lag_cohort_pre_eos,
        list(cast(inside as double) order by lag) as depth_observed,
        list(cast(coalesce(beyond, 0) as double) order by lag) as depth_capacity
    from (
        -- W_L counts the lags j >= L that a branch still has room for, so both are running sums over one profile.
        select
            lags.*, delta, cohort_mismatch, pre_eos,
            sum(coalesce(mismatch, 0)) over (own order by lag) as inside,
            sum(coalesce(branches, 0)) over (own order by lag rows between 1 following and unbounded following) as beyond
        from lags
        left join after_entry using (study, model, doc, action, lag)
        window own as (partition by study, model, doc, action)
    )
    group by study, model, doc, action
)

select
    study, model, doc, action, action_revision,
    cast(-1 as bigint) as unit,
    horizon, cohort_bound, early_last, late_first,
    first_block_last, second_block_last, agreement_run, saturation_threshold,
    scalars.* exclude (study, model, doc, action),
    position_delta, position_f, position_mismatch, position_first_mismatch,
    coalesce(lag_cohort_delta, []) as lag_cohort_delta,
    coalesce(lag_cohort_mismatch, []) as lag_cohort_mismatch,
    coalesce(lag_cohort_pre_eos, []) as lag_cohort_pre_eos,
    depth_observed, depth_capacity
from scalars
inner join revisions using (study, model, doc, action)
inner join positions using (study, model, doc, action)
inner join branches using (study, model, doc, action)
inner join main.windows using (study, model)
