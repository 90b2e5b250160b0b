-- What a branch window of depth L observes and leaves open, one row per document, action and depth 1..H: replicate
-- means of Z_L = (1/H) sum_{j < l_tau} I_{tau+j} and of W_L = (H - tau - L + 1)_+ / H, both 0 without divergence.
with

profiles as (
    select
        study, model, doc, action, replicates, horizon,
        unnest(range(1, horizon + 1)) as depth,
        unnest(depth_observed) as observed,
        unnest(depth_capacity) as capacity
    from internal.unit_moments
),

sums as (
    select
        study, model, doc, action, horizon, depth,
        cast(sum(replicates) as bigint) as replicates,
        sum(observed) as observed,
        sum(capacity) as capacity
    from profiles
    group by study, model, doc, action, horizon, depth
)

select
    study, model, split, stratum, cluster, doc, action,
    cast(depth as integer) as depth,
    replicates,
    observed / (replicates * horizon) as observed,
    capacity / (replicates * horizon) as capacity
from sums
inner join main.documents using (study, model, doc)
