-- The exact decomposition of a token-mismatch gap, action against baseline, over the documents both have:
-- dR = dO + dE (mean C) + dC (mean E). Shares are null where the gap is zero (to rounding, 1e-12).
with

paired_moments as (
    select * from main.paired_moments
),

windows as (
    select * from main.windows
),

risks as materialized (
    select
        paired_moments.study,
        paired_moments.model,
        paired_moments.split,
        paired_moments.stratum,
        paired_moments.action,
        paired_moments.partner,
        paired_moments.documents,
        paired_moments.mismatch,
        paired_moments.diverged / windows.horizon as occurrence,
        paired_moments.exposure,
        coalesce(paired_moments.occupation / nullif(paired_moments.exposure, 0), 0) as mismatch_rate
    from paired_moments
    inner join windows using (study, model)
),

terms as (
    select
        risks.study,
        risks.model,
        risks.split,
        risks.stratum,
        risks.partner as baseline,
        risks.action,
        risks.documents,
        risks.mismatch - baselines.mismatch as gap,
        risks.occurrence - baselines.occurrence as occurrence_term,
        (risks.exposure - baselines.exposure) * (risks.mismatch_rate + baselines.mismatch_rate) / 2 as exposure_term,
        (risks.mismatch_rate - baselines.mismatch_rate) * (risks.exposure + baselines.exposure) / 2 as rate_term
    from risks
    inner join risks as baselines
        on risks.study = baselines.study
        and risks.model = baselines.model
        and risks.split = baselines.split
        and risks.stratum = baselines.stratum
        and risks.partner = baselines.action
        and risks.action = baselines.partner
),

divisors as (
    select
        *,
        case when abs(gap) >= 1e-12 then gap end as divisor
    from terms
)

select
    study,
    model,
    split,
    stratum,
    baseline,
    action,
    documents,
    gap,
    occurrence_term,
    exposure_term,
    rate_term,
    occurrence_term / divisor as occurrence_share,
    exposure_term / divisor as exposure_share,
    rate_term / divisor as rate_share
from divisors
