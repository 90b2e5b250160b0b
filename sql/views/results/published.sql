-- The source paper's numbers as printed. The package brings them, so they are the same in every store. A number keeps
-- the paper's unit (column unit); every other view has fractions.
select study, model, stratum, action, baseline, quantity, x, unit, value, low, high, level, source
from stored.published
