-- The generation clock: E[delta_t], E[f_t] and E[I_t] at each position.
with

position_moments as (
    select * from main.position_moments
),

strata as materialized (
    select
        study,
        model,
        split,
        stratum,
        action,
        t,
        avg(delta) as delta,
        avg(f) as f,
        avg(mismatch) as mismatch
    from position_moments
    group by study, model, split, stratum, action, t
),

pooled as (
    select
        study,
        model,
        split,
        'pooled' as stratum,
        action,
        t,
        avg(delta) as delta,
        avg(f) as f,
        avg(mismatch) as mismatch
    from strata
    group by study, model, split, action, t
)

select * from strata
union all by name
select * from pooled
