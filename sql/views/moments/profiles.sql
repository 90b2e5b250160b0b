-- The moments at each position, lag, bin of KL and depth, summed over the replicates of all units: one row per document and
-- action, with lists. Units are added in their order, so that sums have the same bits in every run.
with

sums as (
    select
        study, model, doc, action,
        any_value(horizon) as horizon,
        any_value(cohort_bound) as cohort_bound,
        cast(sum(replicates) as bigint) as replicates,
        cast(sum(scalar_cohort) as bigint) as cohort_paths,
        list_reduce(
            list(columns('(position|lag|bin|depth)_.*') order by unit),
            lambda one, other: list_transform(list_zip(one, other), lambda pair: pair[1] + pair[2])
        )
    from internal.unit_moments
    group by study, model, doc, action
)

select
    study, model, split, stratum, cluster, doc, action,
    sums.* exclude (study, model, doc, action)
from sums
inner join main.documents using (study, model, doc)
