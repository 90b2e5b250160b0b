-- Prompts, and what is left of them under every action's present revision.
from stored.prompts
anti join internal.superseded using (study, action, action_revision)
