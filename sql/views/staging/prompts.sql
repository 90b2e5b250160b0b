-- Prompts with the places of their present answers, and what is left of them under every action's present revision.
from stored.prompts
anti join internal.superseded using (study, action, action_revision)
qualify document_revision = max(document_revision) over (partition by study, model, doc, action)
