-- The newest stored moments of each document and action. Rows of documents that got trajectories since are still here;
-- the views of moments pass over these rows and compute the moments from steps.
with

newest as (
    select study, model, doc, action, action_revision, max(moments_version) as moments_version
    from stored.document_moments
    group by study, model, doc, action, action_revision
)

select own.*
from stored.document_moments as own
semi join newest using (study, model, doc, action, action_revision, moments_version)
anti join internal.superseded using (study, action, action_revision)
