-- The moments of answers, one row for each analyzed trajectory whose document has answers.
-- A continuation is right if its score is 1. A pair is lost if X is right and Y is not. Before, inside and after compare
-- tau with the positions at which X states the answers; a pair that never diverges is none of the three.
with

pairs as (
    select
        study, model, split, stratum, cluster, doc, action, replicate,
        score_x, score_y,
        score_x = 1 as right_x,
        score_y = 1 as right_y,
        coalesce(tau < span_first, false) as before,
        coalesce(tau between span_first and span_last, false) as inside,
        coalesce(tau > span_last, false) as after
    from main.analyzed_trajectories
    inner join main.scores using (study, model, doc, action, replicate)
)

select
    study, model, split, stratum, cluster, doc, action, replicate,
    score_x as reference_score,
    score_y as compressed_score,
    cast(right_x as double) as reference_right,
    cast(right_x and not right_y as double) as lost,
    cast(right_y and not right_x as double) as gained,
    cast(right_x and before as double) as right_before,
    cast(right_x and inside as double) as right_inside,
    cast(right_x and after as double) as right_after,
    cast(right_x and not right_y and before as double) as lost_from_before,
    cast(right_x and not right_y and inside as double) as lost_from_inside,
    cast(right_x and not right_y and after as double) as lost_from_after
from pairs
