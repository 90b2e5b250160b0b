-- Every document's risk by each of its estimators: means over replicates, the variance and the cost of one replicate,
-- and the exact risk of a finite-state system. 'plain' are coupled pairs, 'swrb' residual branches. If units do not say
-- how many kernel pairs a plain replicate took (a log of another generator), the number follows from the log: one pair
-- at each position through min(H, e'), after which both sides are absorbed.
with

replicates as (
    select
        study, model, split, stratum, action, doc,
        'plain' as estimator,
        mismatches / horizon as risk,
        cast(tau is not null as double) as mass,
        cast(tau is not null as double) / horizon as occurrence,
        occupation / horizon as occupation,
        least(horizon, last_eos) as positions
    from main.analyzed_trajectories
    union all by name
    select
        study, model, split, stratum, action, doc,
        'swrb' as estimator,
        mass * mismatches / horizon as risk,
        mass,
        mass / horizon as occurrence,
        mass * (mismatches - cast(branch is not null as integer)) / horizon as occupation
    from internal.analyzed_branchings
),

measured as (
    select
        study, model, split, stratum, action, doc, estimator,
        count(*) as replicates,
        avg(risk) as risk,
        var_samp(risk) as risk_variance,
        avg(occurrence) as occurrence,
        avg(occupation) as occupation,
        avg(mass) as divergence_probability,
        avg(positions) as logged_evaluations
    from replicates
    group by study, model, split, stratum, action, doc, estimator
),

costs as (
    -- Unknown if any unit does not say.
    select
        study, model, action, doc, estimator,
        case when count(pair_evaluations) = count(*) then sum(pair_evaluations) / sum(replicates) end as evaluations,
        case when count(decode_seconds) = count(*) then sum(decode_seconds) / sum(replicates) end as seconds
    from main.units
    group by study, model, action, doc, estimator
),

exact_risks as (
    select study, model, action, doc, value as exact_risk
    from main.exact_values
    where quantity = 'mismatch' and x is null
)

select
    study, model, split, stratum, action, doc, estimator,
    replicates, risk, risk_variance, occurrence, occupation, divergence_probability, exact_risk,
    coalesce(evaluations, logged_evaluations) as evaluations,
    seconds
from measured
left join costs using (study, model, action, doc, estimator)
left join exact_risks using (study, model, action, doc)
