-- Prompts with the places of their current answers, and the entries that every action's current revision keeps of them.
from stored.prompts
anti join internal.superseded using (study, action, action_revision)
qualify document_revision = max(document_revision) over (partition by study, model, doc, action)
