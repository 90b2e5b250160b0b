-- Right answers that divergence loses and gains: documents of a stratum with equal weight, then strata with equal weight.
-- Documents without answers are in no row.
with

strata as (
    select
        study, model, split, stratum, action,
        count(*) as documents,
        cast(sum(replicates) as bigint) as trajectories,
        avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, replicates)) order by doc)
    from main.document_answers
    group by study, model, split, stratum, action
),

pooled as (
    select
        study, model, split,
        coalesce(stratum, 'pooled') as stratum,
        action,
        cast(sum(documents) as bigint) as documents,
        cast(sum(trajectories) as bigint) as trajectories,
        avg(columns(* exclude (study, model, split, stratum, action, documents, trajectories)) order by stratum)
    from strata
    group by study, model, split, rollup (stratum), action
)

select
    study, model, split, stratum, action, documents, trajectories,
    reference_score as accuracy_reference,
    compressed_score as accuracy,
    compressed_score - reference_score as score_gap,
    reference_right,
    lost,
    gained,
    lost / nullif(reference_right, 0) as lost_share,
    right_before / nullif(reference_right, 0) as before,
    right_inside / nullif(reference_right, 0) as inside,
    right_after / nullif(reference_right, 0) as after,
    lost_from_before / nullif(right_before, 0) as lost_before,
    lost_from_inside / nullif(right_inside, 0) as lost_inside,
    lost_from_after / nullif(right_after, 0) as lost_after
from pooled
