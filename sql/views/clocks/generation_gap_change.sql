-- The change of the gap in rollout distance between two actions from the first block to the last, over the documents
-- both have: block gaps g_J = E[delta of action] - E[delta of baseline], and the last gap minus the first.
with

paired_moments as materialized (select * from internal.paired_moments),

gaps as (
    select
        study, model, split, stratum, partner as baseline, action, own.documents,
        own.block_1_delta - baselines.block_1_delta as first_gap,
        own.block_2_delta - baselines.block_2_delta as middle_gap,
        own.block_3_delta - baselines.block_3_delta as last_gap
    from paired_moments as own
    inner join (select * replace (partner as action, action as partner) from paired_moments) as baselines
        using (study, model, split, stratum, action, partner)
)

select *, last_gap - first_gap as generation_gap_change
from gaps
