-- The revisions of documents that a later one of the same document supersedes: other answers, scoring or cluster. What was
-- scored by these revisions is in no other view.
select
    study,
    model,
    doc,
    document_revision
from stored.documents
qualify document_revision < max(document_revision) over (partition by study, model, doc)
