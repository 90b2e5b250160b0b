-- What a branch window of depth L observes and leaves open, one row per document, action and depth 1..H: replicate
-- means of Z_L = (1/H) sum_{j < l_tau} I_{tau+j} and of W_L = (H - tau - L + 1)_+ / H, both 0 without divergence.
-- W_L counts the lags j >= L that a branch still has room for, so both are running sums over one profile of lags.
with

trajectories as (select * from main.analyzed_trajectories),

documents as (
    select
        study, model, split, stratum, cluster, doc, action,
        any_value(horizon) as horizon,
        count(*) as replicates
    from trajectories
    group by study, model, split, stratum, cluster, doc, action
),

profile as (
    select
        study, model, doc, action, lag + 1 as depth,
        sum(mismatch) as mismatches,
        count(*) as branches
    from main.steps
    semi join trajectories using (study, model, doc, action, replicate)
    where lag >= 0
    group by study, model, doc, action, lag
),

depths as (
    select *, unnest(range(1, horizon + 1)) as depth
    from documents
),

counts as (
    select
        depths.*,
        sum(coalesce(mismatches, 0)) over inside as observed,
        sum(coalesce(branches, 0)) over beyond as open
    from depths
    left join profile using (study, model, doc, action, depth)
    window
        inside as (
            partition by study, model, doc, action order by depth
            rows between unbounded preceding and current row
        ),
        beyond as (
            partition by study, model, doc, action order by depth
            rows between 1 following and unbounded following
        )
)

select
    study, model, split, stratum, cluster, doc, action,
    cast(depth as integer) as depth,
    replicates,
    observed / (replicates * horizon) as observed,
    coalesce(open, 0) / (replicates * horizon) as capacity
from counts
