-- Staging: the stored table as it is, one selector with its parameters and retention.
select
    study,
    action,
    selector,
    keep,
    "window",
    kernel,
    pooling,
    head_reduction,
    sinks,
    position_mode,
    control,
    prespecified,
    parameters
from stored.actions
