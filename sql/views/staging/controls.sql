-- Full-retention controls: how many of their pairs moved, and the first pair that moved.
-- A control goes through the same code as any other action, so its pairs agree and delta and f are exactly 0. Neither is
-- ever negative, so a pair's sums are 0 only if delta and f are 0 at every position, and events need not be read. Pairs
-- that enter no estimate (incomplete, or of a document without a row in documents) count as well.
with

pairs as (
    select
        study, model, split, action, doc, replicate, sum_delta, sum_f,
        sum_delta <> 0 or sum_f <> 0 or mismatches > 0 as moved
    from main.trajectories
    inner join main.actions using (study, action)
    left join main.documents using (study, model, doc)
    where control
),

counted as (
    select
        study, model, split, action,
        count(distinct doc) as documents,
        count(*) as pairs,
        count(*) filter (where moved) as moved_pairs,
        min(row(doc, replicate)) filter (where moved) as first_moved,
        max(sum_delta) as largest_sum_delta,
        max(sum_f) as largest_sum_f
    from pairs
    group by study, model, split, action
)

select
    study, model, split, action, documents, pairs, moved_pairs,
    first_moved[1] as first_moved_doc,
    first_moved[2] as first_moved_replicate,
    largest_sum_delta, largest_sum_f
from counted
