-- The exact decomposition of a token-mismatch gap, action against baseline, over the documents both have:
-- dR = dO + dE (mean C) + dC (mean E). Shares are null if the gap is zero (to rounding, 1e-12).
with

risks as materialized (
    select
        study, model, split, stratum, action, partner, documents, mismatch, exposure,
        diverged / horizon as occurrence,
        written,
        mismatch / written as mismatch_written,
        written_exposure / written as exposure_written,
        coalesce(occupation / nullif(exposure, 0), 0) as mismatch_rate
    from internal.paired_moments
    inner join main.windows using (study, model)
),

terms as (
    select
        study, model, split, stratum, partner as baseline, action, own.documents,
        own.mismatch - baselines.mismatch as gap,
        own.occurrence - baselines.occurrence as occurrence_term,
        (own.exposure - baselines.exposure) * (own.mismatch_rate + baselines.mismatch_rate) / 2 as exposure_term,
        (own.mismatch_rate - baselines.mismatch_rate) * (own.exposure + baselines.exposure) / 2 as rate_term,
        own.written - baselines.written as written_difference,
        own.mismatch_written - baselines.mismatch_written as mismatch_written_difference,
        own.exposure_written - baselines.exposure_written as exposure_written_difference
    from risks as own
    inner join (select * replace (partner as action, action as partner) from risks) as baselines
        using (study, model, split, stratum, action, partner)
),

divisors as (
    select *, case when abs(gap) >= 1e-12 then gap end as divisor
    from terms
)

select
    * exclude (divisor),
    occurrence_term / divisor as occurrence_share,
    exposure_term / divisor as exposure_share,
    rate_term / divisor as rate_share
from divisors
