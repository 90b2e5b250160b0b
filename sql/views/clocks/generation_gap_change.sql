-- How the gap in rollout distance between two actions changes from the first block to the last, over the documents
-- both have: block gaps g_J = E[delta of action] - E[delta of baseline] and last minus first.
with

paired_moments as materialized (
    select
        study,
        model,
        split,
        stratum,
        action,
        partner,
        documents,
        block_1_delta,
        block_2_delta,
        block_3_delta
    from main.paired_moments
),

gaps as (
    select
        own.study,
        own.model,
        own.split,
        own.stratum,
        own.partner as baseline,
        own.action,
        own.documents,
        own.block_1_delta - baselines.block_1_delta as first_gap,
        own.block_2_delta - baselines.block_2_delta as middle_gap,
        own.block_3_delta - baselines.block_3_delta as last_gap
    from paired_moments as own
    inner join paired_moments as baselines
        on own.study = baselines.study
        and own.model = baselines.model
        and own.split = baselines.split
        and own.stratum = baselines.stratum
        and own.partner = baselines.action
        and own.action = baselines.partner
)

select
    *,
    last_gap - first_gap as generation_gap_change
from gaps
