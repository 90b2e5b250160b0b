-- What the intervals decide about every action, as on the page of a study: its badge, and a row for each interval behind
-- the badge. An action is ruled out if another action holds no more bytes and has surely less R; it is recommended if
-- it is not ruled out and its R differs surely from that of every other action that is left; it loses answers if it
-- would be recommended and surely loses more than half of the right ones. All other actions are undecided, and so are
-- all actions of a study that is not finished, has a control that moved, or lacks intervals, bytes or a second action.
-- Intervals of more than two actions hold for all pairs together; if the plan named a difference, both must exclude 0.
with

actions as (
    select
        summary.study, summary.model, summary.action, summary.mismatch, summary.status,
        actions.weights, actions.selector = 'numerics' as is_floor
    from main.summary
    inner join main.actions using (study, action)
    where not actions.control
),

candidates as (select * from actions where not is_floor),

weights as (
    select study, model, action, max(weight_bytes) as weight_bytes
    from internal.document_bytes
    group by study, model, action
),

-- Ratios of bytes over the documents of both actions; caches within half a percent of each other are equal.
ratios as (
    select
        study, model, mine.action, theirs.action as other,
        case when count(mine.cache_bytes) = count(*) and count(theirs.cache_bytes) = count(*)
            then sum(mine.cache_bytes) / nullif(sum(theirs.cache_bytes), 0) end as ratio
    from internal.document_bytes as mine
    inner join internal.document_bytes as theirs using (study, model, doc)
    inner join main.documents using (study, model, doc)
    where documents.split = 'evaluation'
    group by study, model, mine.action, theirs.action
),

gaps as (
    select
        study, model, action, baseline as other, quantity, estimate, low, high, level, documents, family,
        case when family is not null and status in ('prespecified', 'seen') then status else 'exploratory' end as standing
    from main.estimates
    where split = 'evaluation' and stratum = 'pooled' and x is null and quantity in ('gap', 'gap_simultaneous')
),

-- Of a difference and its mirror image, the planned one; else the difference itself.
single as (
    select study, model, action, other, estimate, low, high, level, documents, standing
    from (
        from gaps select *, 0 as turned where quantity = 'gap'
        union all by name
        from gaps select
            * replace (other as action, action as other, -estimate as estimate, -high as low, -low as high), 1 as turned
        where quantity = 'gap'
    )
    qualify row_number() over (
        partition by study, model, action, other
        order by low is null, list_position(['prespecified', 'seen', 'exploratory'], standing), turned
    ) = 1
),

together as (select * from gaps where quantity = 'gap_simultaneous'),

compared as (
    select
        mine.study, mine.model, mine.action, theirs.action as other, theirs.is_floor, theirs.mismatch as other_mismatch,
        ratios.ratio as bytes_ratio,
        mine.weights is not distinct from theirs.weights as same_weights,
        single, together,
        count(together.low) over (partition by mine.study, mine.model) > 2 and together.low is not null and not coalesce(
            single.standing in ('prespecified', 'seen') and (together.low > 0 or together.high < 0)
            and not coalesce(single.low > 0 or single.high < 0, false),
            false
        ) as by_all
    from candidates as mine
    inner join actions as theirs on
        mine.study = theirs.study and mine.model = theirs.model and mine.action <> theirs.action
    left join ratios on
        mine.study = ratios.study and mine.model = ratios.model and mine.action = ratios.action
        and theirs.action = ratios.other
    left join single on
        mine.study = single.study and mine.model = single.model and mine.action = single.action
        and theirs.action = single.other
    left join together on
        mine.study = together.study and mine.model = together.model and mine.action = together.action
        and theirs.action = together.other
),

-- R of the action less R of the other, with the interval that decides.
differences as (
    select
        study, model, action, other, is_floor, other_mismatch, same_weights,
        case when abs(bytes_ratio - 1) < 0.005 then 1 else bytes_ratio end as bytes_ratio,
        case when by_all or is_floor then together.estimate else single.estimate end as estimate,
        case when by_all or is_floor then together.low else single.low end as low,
        case when by_all or is_floor then together.high else single.high end as high,
        case when by_all or is_floor then together.level else single.level end as level,
        case when by_all or is_floor then together.documents else single.documents end as documents,
        case when is_floor then 'exploratory' else coalesce(single.standing, 'exploratory') end as standing
    from compared
),

newest_plans as (
    select study, model, cast(plan as json) as plan
    from internal.plans
    anti join internal.superseded_plans using (study, model, plan_sha256)
),

-- Studies whose plan wants documents that an action lacks, or whose interim looks leave an endpoint open.
wanted as (
    select
        study, model, action, stratum,
        wanted - least(coalesce(forgotten, 0), greatest(0, wanted - coalesce(frozen, 0))) as wanted
    from (
        select
            study, model, stratum,
            unnest(cast(plan -> 'actions' as varchar[])) as action,
            cast(plan ->> 'documents_per_stratum' as bigint) as wanted,
            json_array_length(plan -> 'documents' -> 'evaluation' -> stratum) as frozen,
            cast(plan -> 'forgotten' -> 'evaluation' ->> stratum as bigint) as forgotten
        from (select *, unnest(cast(plan -> 'strata' as varchar[])) as stratum from newest_plans)
        where (plan -> 'sequential') is null
    )
),

measured as (
    select study, model, action, stratum, count(distinct doc) as documents
    from internal.document_bytes
    inner join main.documents using (study, model, doc)
    where split = 'evaluation'
    group by study, model, action, stratum
),

unfinished as (
    select distinct study, model
    from wanted
    inner join actions using (study, model, action)
    left join measured using (study, model, action, stratum)
    where coalesce(documents, 0) < wanted
    union
    select study, model
    from newest_plans
    left join main.sequence using (study, model)
    where (plan -> 'sequential') is not null
    qualify rank() over (partition by study, model order by look desc nulls last) = 1
        and coalesce(look, 0) < json_array_length(plan -> 'sequential' -> 'looks')
        and bool_or(resolved is not true) over (partition by study, model, look)
),

obstructed as (
    select study, model from unfinished
    union
    select study, model from main.controls where moved_pairs > 0
    union
    select study, model from actions where status is null or status = 'outdated'
    union
    select study, model from differences where not is_floor and same_weights and bytes_ratio is null
    union
    select study, model from candidates group by study, model having count(*) < 2
),

choosing as (
    select *
    from differences
    anti join obstructed using (study, model)
    where not is_floor
),

no_more_weights as (
    select mine.study, mine.model, mine.action, theirs.action as other
    from candidates as mine
    inner join candidates as theirs using (study, model)
    left join weights as own on mine.study = own.study and mine.model = own.model and mine.action = own.action
    left join weights as others on mine.study = others.study and mine.model = others.model and theirs.action = others.action
    where mine.weights is not distinct from theirs.weights or own.weight_bytes <= others.weight_bytes
),

-- The action with the least R that rules an action out.
ruled_out as (
    select study, model, action, arg_min(other, other_mismatch) as other
    from choosing
    semi join no_more_weights as lighter
        on choosing.study = lighter.study and choosing.model = lighter.model
        and choosing.other = lighter.action and choosing.action = lighter.other
    where low > 0 and bytes_ratio >= 1
    group by study, model, action
),

-- The differences between actions that are left.
open_pairs as (
    select *
    from choosing
    anti join ruled_out using (study, model, action)
    anti join ruled_out as other_out
        on choosing.study = other_out.study and choosing.model = other_out.model and choosing.other = other_out.action
),

undecided as (select * from open_pairs where not coalesce(low > 0 or high < 0, false)),

losing as (
    select study, model, action, estimate, low, high, level, documents, standing
    from (
        select *, case when family is not null and status in ('prespecified', 'seen') then status else 'exploratory' end
            as standing
        from main.estimates
        where split = 'evaluation' and stratum = 'pooled' and quantity = 'lost_share' and baseline is null and low > 0.5
    )
),

badges as (
    select
        candidates.study, candidates.model, candidates.action,
        case
            when candidates.weights is not null and weights.weight_bytes is null then 'other weights'
            when obstructed.study is not null then 'undecided'
            when ruled_out.other is not null then 'ruled out'
            when undecided.action is not null then 'undecided'
            when losing.action is not null then 'loses answers'
            else 'recommended'
        end as badge
    from candidates
    left join weights using (study, model, action)
    left join obstructed using (study, model)
    left join ruled_out using (study, model, action)
    left join (select distinct study, model, action from undecided) as undecided using (study, model, action)
    left join losing using (study, model, action)
),

reasons as (
    select study, model, action, 'ruled out by' as says, other, estimate, low, high, level, standing, documents, bytes_ratio
    from choosing
    semi join ruled_out using (study, model, action, other)
    union all by name
    select study, model, action, 'rules out' as says, other, estimate, low, high, level, standing, documents, bytes_ratio
    from choosing
    semi join (select study, model, other as action, action as other from ruled_out) as beaten
        using (study, model, action, other)
    union all by name
    select study, model, action, 'undecided against' as says, other, estimate, low, high, level, standing, documents, bytes_ratio
    from undecided
    union all by name
    select study, model, action, 'differs from' as says, other, estimate, low, high, level, standing, documents, bytes_ratio
    from open_pairs
    semi join (select * from badges where badge in ('recommended', 'loses answers')) as mine using (study, model, action)
    semi join (select study, model, action as other from badges where badge in ('recommended', 'loses answers')) as theirs
        using (study, model, other)
    union all by name
    select study, model, action, 'loses answers' as says, estimate, low, high, level, standing, documents
    from losing
    semi join (select * from badges where badge = 'loses answers') as mine using (study, model, action)
    union all by name
    select study, model, action, 'not distinguished from' as says, other, estimate, low, high, level, standing, documents
    from differences
    where is_floor and coalesce(low, 0) <= 0
)

select
    study, model, action, badge, says, other, estimate, low, high, level, standing as status, documents, bytes_ratio,
    case
        when says = 'undecided against' and estimate <> 0
            and power((high - low) / 2 / abs(estimate), 2) <= 25
            then ceil(greatest(power((high - low) / 2 / abs(estimate), 2), 1.1) * documents)
    end as documents_needed
from badges
left join reasons using (study, model, action)
order by study, model, action, says, other
