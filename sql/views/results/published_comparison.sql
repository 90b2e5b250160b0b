-- The paper's numbers beside the store's estimates, in the names and units of estimates. A study has rows if its model's
-- id ends in the paper's name of a model, if its windows are the paper's, and if its tokens are drawn from the full
-- softmax at temperature 1; other settings measure other quantities. The rows are those of the study's actions, matched
-- by name. If the paper prints a number twice, as text and in a figure, the number with an interval stands here.
with

names (printed, quantity) as (
    values
    ('occurrence_term', 'occurrence_term'),
    ('exposure_term', 'exposure_term'),
    ('rate_term', 'rate_term'),
    ('exposure_share', 'exposure_share'),
    ('eos_share', 'eos_share'),
    ('rollout_tv_gap', 'rollout_tv_gap'),
    ('fixed_history_gap', 'fixed_history_gap'),
    ('flat_extrapolation_gap', 'flat_extrapolation_gap'),
    ('full_minus_fixed_history', 'full_minus_fixed_history'),
    ('full_minus_flat_extrapolation', 'full_minus_flat_extrapolation'),
    ('divergence_cdf', 'entry_cdf'),
    ('mean_entry_given_divergence', 'mean_entry'),
    ('token_mismatch_gap', 'gap'),
    ('branch_cohort_fraction', 'cohort_fraction'),
    ('branch_tv', 'branch_delta'),
    ('early_branch_tv', 'early'),
    ('late_branch_tv', 'late'),
    ('late_minus_early_branch_tv', 'late_minus_early'),
    ('late_minus_early_pre_eos_branch_tv', 'late_minus_early_pre_eos'),
    ('saturation_99', 'saturation'),
    ('sixteen_consecutive_pre_eos_agreements', 'long_agreement'),
    ('generation_clock_tv_gap', 'generation_gap'),
    ('generation_clock_gap_change', 'generation_gap_change'),
    ('history_gap_difference', 'history_gap'),
    ('history_gap_difference_pre_eos', 'pre_eos')
),

-- % and pp as fractions. 1e-2 is a DOUBLE, 0.01 would be a DECIMAL.
scales (unit, own_unit, scale) as (
    values
    ('%', 'fraction', 1e-2), ('pp', 'fraction', 1e-2), ('fraction', 'fraction', 1e0), ('steps', 'tokens', 1e0)
),

paper as (
    select
        published.study as published_study,
        published.model as published_model,
        coalesce(published.stratum, 'pooled') as stratum,
        published.action, published.baseline, names.quantity,
        cast(case published.x when '1-32' then '1' when '33-64' then '2' when '65-128' then '3' else published.x end as integer)
            as x,
        scales.own_unit as unit,
        published.value * scales.scale as published,
        published.low * scales.scale as published_low,
        published.high * scales.scale as published_high,
        published.level as published_level,
        published.source
    from main.published
    inner join names on regexp_replace(published.quantity, '_figure$', '') = names.printed
    inner join scales on published.unit = scales.unit
),

-- Every pair that diverges within the horizon has diverged by the last position.
placed as (
    select * from paper
    union all by name
    select * replace ('divergence_probability' as quantity, cast(null as integer) as x)
    from paper
    where quantity = 'entry_cdf' and x = 128
),

other_samplings as (
    select study, model from main.studies where temperature != 1.0 or top_p is not null or top_k is not null
),

comparable as (
    select study, model
    from main.windows
    anti join other_samplings using (study, model)
    where
        horizon = 128 and cohort_bound = 64 and early_last = 16 and late_first = 49
        and first_block_last = 32 and second_block_last = 64
        and agreement_run = 16 and saturation_threshold = cast(0.99 as double)
),

generated as (select distinct study, model, action from main.units),

matched as (
    select comparable.study, comparable.model, placed.*
    from comparable
    inner join placed
        on ends_with(rtrim('/' || lower(comparable.model), '/'), '/' || lower(placed.published_model))
    inner join generated
        on
            comparable.study = generated.study and comparable.model = generated.model
            and placed.action = generated.action
    left join generated as subtracted
        on
            comparable.study = subtracted.study and comparable.model = subtracted.model
            and placed.baseline = subtracted.action
    where placed.baseline is null or subtracted.action is not null
    qualify row_number() over (
        partition by
            comparable.study, comparable.model, placed.stratum, placed.action, placed.baseline, placed.quantity, placed.x
        order by placed.published_low is null, placed.published_study, placed.source desc
    ) = 1
)

select
    matched.study, matched.model, matched.stratum, matched.action, matched.baseline, matched.quantity, matched.x,
    matched.unit, matched.published, matched.published_low, matched.published_high, matched.published_level,
    own.estimate, own.low, own.high, own.level, own.documents, own.status,
    matched.published_study, matched.source
from matched
left join main.estimates as own
    on
        own.split = 'evaluation'
        and matched.study = own.study and matched.model = own.model
        and matched.stratum = own.stratum and matched.action = own.action
        and matched.baseline is not distinct from own.baseline
        and matched.quantity = own.quantity
        and matched.x is not distinct from own.x
