-- The generation clock: E[delta_t], E[f_t] and E[I_t] at each position.
with

strata as (
    select
        study, model, split, stratum, action, t,
        avg(delta) as delta,
        avg(f) as f,
        avg(mismatch) as mismatch
    from internal.position_moments
    group by study, model, split, stratum, action, t
)

select
    study, model, split,
    coalesce(stratum, 'pooled') as stratum,
    action, t,
    avg(columns(* exclude (study, model, split, stratum, action, t)))
from strata
group by study, model, split, rollup (stratum), action, t
