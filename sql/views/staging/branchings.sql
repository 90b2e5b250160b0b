-- Staging: the stored table as it is, one replicate of residual branching.
select
    study,
    model,
    doc,
    action,
    replicate,
    horizon,
    complete,
    scanned,
    mass,
    branch,
    mismatches
from stored.branchings
