-- Staging: the stored table as it is, one position of one coupled pair, with its place on both clocks.
select
    study,
    model,
    doc,
    action,
    replicate,
    t,
    mismatch,
    lag,
    eos_set,
    delta,
    f
from stored.steps
