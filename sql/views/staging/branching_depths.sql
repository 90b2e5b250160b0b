-- Staging: the stored table as it is, one replicate of residual branching seen to one depth.
select
    study,
    model,
    doc,
    action,
    replicate,
    depth,
    observed,
    capacity
from stored.branching_depths
