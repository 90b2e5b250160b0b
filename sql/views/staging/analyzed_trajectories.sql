-- The trajectories that enter estimates, with their document's split and stratum and their study's horizon.
-- A trajectory enters when it is complete and ends at its study's horizon (one that stops short is truncated, not a
-- shorter study), and when its document has a row in documents: without one it has neither split nor stratum.
-- first_eos and last_eos are e and e', no EOS counting as H + 1.
with

trajectories as (
    select * from main.trajectories
),

documents as (
    select * from main.documents
),

windows as (
    select * from main.windows
),

complete as (
    select
        *,
        coalesce(eos_x, horizon + 1) as reference_eos,
        coalesce(eos_y, horizon + 1) as compressed_eos
    from trajectories
    where complete
)

select
    complete.study,
    complete.model,
    documents.split,
    documents.stratum,
    documents.cluster,
    complete.doc,
    complete.action,
    complete.replicate,
    complete.horizon,
    complete.tau,
    complete.eos_x,
    complete.eos_y,
    cast(least(complete.reference_eos, complete.compressed_eos) as integer) as first_eos,
    cast(greatest(complete.reference_eos, complete.compressed_eos) as integer) as last_eos,
    complete.mismatches,
    complete.sum_delta,
    complete.sum_f,
    complete.exposure,
    complete.occupation,
    complete.longest_agreement,
    complete.mismatch_after_agreement,
    coalesce(complete.tau <= windows.cohort_bound, false) as in_cohort
from complete
inner join windows using (study, model, horizon)
inner join documents using (study, model, doc)
