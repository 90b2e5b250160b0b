-- The difference of two actions' history gaps R(TV) - F, over the documents both have, and the part of the difference
-- from positions at or after the first EOS. eos_share may be negative; it is null if the difference is zero (to
-- rounding, 1e-12).
with

gaps as materialized (
    select
        study, model, split, stratum, action, partner, documents,
        rollout_tv - fixed_history_tv as history_gap,
        eos_gap_0 as pre_eos,
        eos_gap_1 + eos_gap_2 + eos_gap_3 as eos_related
    from internal.paired_moments
),

differences as (
    select
        study, model, split, stratum, partner as baseline, action, own.documents,
        own.history_gap - baselines.history_gap as history_gap,
        own.pre_eos - baselines.pre_eos as pre_eos,
        own.eos_related - baselines.eos_related as eos_related
    from gaps as own
    inner join (select * replace (partner as action, action as partner) from gaps) as baselines
        using (study, model, split, stratum, action, partner)
)

select *, case when abs(history_gap) >= 1e-12 then eos_related / history_gap end as eos_share
from differences
