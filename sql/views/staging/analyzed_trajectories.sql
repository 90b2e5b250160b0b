-- The trajectories that enter estimates, with their document's split and stratum and their study's horizon.
-- A trajectory enters when it is complete and ends at its study's horizon (a pair that stops short is truncated, not a
-- shorter study), and when its document has a row in documents: without one it has neither split nor stratum.
-- first_eos and last_eos are e and e', no EOS counting as H + 1.
with

complete as (
    select
        *,
        coalesce(eos_x, horizon + 1) as reference_eos,
        coalesce(eos_y, horizon + 1) as compressed_eos
    from main.trajectories
    where complete
)

select
    study, model, split, stratum, cluster, doc, action, replicate,
    horizon, tau, eos_x, eos_y,
    cast(least(reference_eos, compressed_eos) as integer) as first_eos,
    cast(greatest(reference_eos, compressed_eos) as integer) as last_eos,
    mismatches, sum_delta, sum_f, exposure, occupation, longest_agreement, mismatch_after_agreement,
    coalesce(tau <= cohort_bound, false) as in_cohort
from complete
inner join main.windows using (study, model, horizon)
inner join main.documents using (study, model, doc)
