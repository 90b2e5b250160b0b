-- Staging: the stored table as it is, one quantity of one finite-state system, by enumeration.
select
    study,
    model,
    doc,
    action,
    quantity,
    x,
    value
from stored.exact_values
