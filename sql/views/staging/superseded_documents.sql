-- The revisions of documents that a later revision of the same document supersedes: other answers, scoring or cluster.
-- Scores by these revisions are in no other view.
select
    study,
    model,
    doc,
    document_revision
from stored.documents
qualify document_revision < max(document_revision) over (partition by study, model, doc)
