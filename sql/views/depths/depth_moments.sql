-- What a branch window of depth L observes and leaves open, one row per document, action and depth 1..H: replicate
-- means of Z_L = (1/H) sum_{j < l_tau} I_{tau+j} and of W_L = (H - tau - L + 1)_+ / H, both 0 without divergence.
select
    study, model, split, stratum, cluster, doc, action,
    cast(unnest(range(1, horizon + 1)) as integer) as depth,
    replicates,
    unnest(depth_observed) / (replicates * horizon) as observed,
    unnest(depth_capacity) / (replicates * horizon) as capacity
from internal.profiles
