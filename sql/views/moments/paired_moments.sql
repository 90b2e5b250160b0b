-- The pooled moments of an action over the documents that a partner action has too. A contrast of the two joins the row
-- (action, partner) with the row (partner, action); both rows pool the same documents with the same weights.
with

moments as materialized (select * from main.moments),

shared as (
    select moments.*, partners.action as partner
    from moments
    inner join moments as partners using (study, model, doc)
    where moments.action <> partners.action
),

strata as (
    select
        study, model, split, stratum, action, partner,
        count(*) as documents,
        avg(columns(* exclude (study, model, split, stratum, cluster, doc, action, partner, replicates)))
    from shared
    group by study, model, split, stratum, action, partner
)

select
    study, model, split,
    coalesce(stratum, 'pooled') as stratum,
    action, partner,
    cast(sum(documents) as bigint) as documents,
    avg(columns(* exclude (study, model, split, stratum, action, partner, documents)))
from strata
group by study, model, split, rollup (stratum), action, partner
