-- Staging: the stored table as it is, one tokenized prompt.
select
    study,
    model,
    doc,
    split,
    stratum,
    cluster,
    task,
    source,
    prompt_tokens,
    prompt_sha256,
    answers
from stored.documents
