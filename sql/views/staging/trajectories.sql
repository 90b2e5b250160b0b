-- Staging: the stored table as it is, one coupled pair of continuations.
select
    study,
    model,
    doc,
    action,
    replicate,
    tau,
    eos_x,
    eos_y,
    horizon,
    complete,
    mismatches,
    sum_delta,
    sum_f,
    exposure,
    occupation,
    longest_agreement,
    mismatch_after_agreement
from stored.trajectories
