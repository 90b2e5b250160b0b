-- The units of every action's current revision.
select own.*
from stored.units as own
anti join internal.superseded using (study, action, action_revision)
