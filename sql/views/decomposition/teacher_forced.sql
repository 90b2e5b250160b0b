-- Distances beside total variation: KL of the compressed model's next-token distribution from the reference's, along X and
-- along own histories, and whether the most probable tokens along X are equal. Each is over the positions up to X's end;
-- means are over those where KL is finite. The 99% quantile is read off the counts in bins of KL, as stats/quantities.py
-- does: bin 0 has the value 0, and the upper edges of bins 1, 2, ... are 2^-40, 2^-39.75, ..., 2^10 nats.
with

documents as (
    select
        study, model, split, stratum, action, doc,
        unnest(range(0, len(bin_kl))) as bin,
        unnest(bin_kl) / replicates as positions
    from internal.profiles
),

strata as (
    select study, model, split, stratum, action, bin, avg(positions) as positions
    from documents
    group by study, model, split, stratum, action, bin
),

bins as (
    select study, model, split, coalesce(stratum, 'pooled') as stratum, action, bin, avg(positions) as positions
    from strata
    group by study, model, split, rollup (stratum), action, bin
),

shares as (
    select
        *,
        positions / nullif(sum(positions) over of_action, 0) as share,
        sum(positions) over (of_action order by bin) / nullif(sum(positions) over of_action, 0) as cdf
    from bins
    window of_action as (partition by study, model, split, stratum, action)
),

reached as (
    select
        study, model, split, stratum, action,
        min(bin) as bin,
        arg_min(greatest(0, least(1, 1 - (cdf - 0.99) / share)), bin) as part
    from shares
    where cdf >= 0.99 - 1e-9 and share > 0
    group by study, model, split, stratum, action
),

tails as (
    select
        * exclude (bin, part),
        case
            when bin = 0 then 0
            when bin = 1 then part * pow(2, -40)
            when bin < 202 then pow(2, -40 + (bin - 2 + part) / 4)
        end as kl_fixed_history_p99
    from reached
)

select
    study, model, split, stratum, action, documents, trajectories,
    fixed_history_tv,
    kl_own_sum / nullif(kl_own_finite, 0) as kl,
    kl_sum / nullif(kl_finite, 0) as kl_fixed_history,
    kl_fixed_history_p99,
    top1_agreements / nullif(kl_positions, 0) as top1_agreement,
    (kl_positions - kl_finite) / nullif(kl_positions, 0) as kl_infinite,
    (kl_positions - kl_own_finite) / nullif(kl_positions, 0) as kl_own_infinite,
    kl_positions / horizon as kl_positions
from internal.stratum_moments
inner join main.windows using (study, model)
left join tails using (study, model, split, stratum, action)
