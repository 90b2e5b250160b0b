-- The revisions of a study's documents that a later one supersedes. What was estimated from them is in no other view.
select
    study,
    model,
    cast(unnest(range(max(document_revision))) as integer) as documents_revision
from stored.documents
group by study, model
