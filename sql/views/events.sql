-- Staging: the stored table as it is, one position of one coupled pair.
select
    study,
    model,
    doc,
    action,
    replicate,
    t,
    x_token,
    y_token,
    delta,
    f,
    x_eos,
    y_eos
from stored.events
