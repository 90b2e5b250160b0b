-- The risk of every action by residual branching, pooled as decomposition pools coupled pairs, beside the risk by the
-- coupled pairs of the same documents. Both are unbiased, so their difference is Monte Carlo error. Its standard error,
-- given the documents, is sqrt(sum_d w_d^2 (variance / replicates of each)).
with

swrb as (select * from main.swrb),

documents as (
    select
        branched.study, branched.model, branched.split, branched.stratum, branched.action, branched.replicates,
        branched.risk as mismatch,
        branched.occurrence,
        branched.occupation,
        branched.divergence_probability,
        plain.risk as plain_mismatch,
        branched.risk_variance / branched.replicates + plain.risk_variance / plain.replicates as squared_error
    from swrb as branched
    left join (select * from swrb where estimator = 'plain') as plain using (study, model, action, doc)
    where branched.estimator = 'swrb'
),

strata as (
    select
        study, model, split, stratum, action,
        count(*) as documents,
        sum(replicates) as replicates,
        avg(mismatch) as mismatch,
        avg(occurrence) as occurrence,
        avg(occupation) as occupation,
        avg(divergence_probability) as divergence_probability,
        case when count(plain_mismatch) = count(*) then avg(plain_mismatch) end as plain_mismatch,
        case when count(squared_error) = count(*) then avg(squared_error) / count(*) end as squared_error
    from documents
    group by study, model, split, stratum, action
)

select
    study, model, split,
    coalesce(stratum, 'pooled') as stratum,
    action,
    cast(sum(documents) as bigint) as documents,
    cast(sum(replicates) as bigint) as replicates,
    avg(mismatch) as mismatch,
    avg(occurrence) as occurrence,
    avg(occupation) as occupation,
    avg(divergence_probability) as divergence_probability,
    case when count(plain_mismatch) = count(*) then avg(plain_mismatch) end as plain_mismatch,
    case when count(squared_error) = count(*) then sqrt(avg(squared_error) / count(*)) end as monte_carlo_error
from strata
group by study, model, split, rollup (stratum), action
