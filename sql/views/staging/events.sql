-- Staging: the stored table as it is, one position of one coupled pair, of one overlap scan or of one residual branch.
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
    y_eos,
    kind,
    weight
from stored.events
