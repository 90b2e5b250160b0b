-- The source paper's numbers as printed, vendored with this package: they are the same in every store. What the paper
-- calls a quantity keeps the paper's unit (see the column unit); every other view has fractions.
select study, model, stratum, action, baseline, quantity, x, unit, value, low, high, level, source
from stored.published
