-- The revisions of a study's documents that a later revision supersedes. No other view shows estimates made from them.
select
    study,
    model,
    cast(unnest(range(max(document_revision))) as integer) as documents_revision
from stored.documents
group by study, model
