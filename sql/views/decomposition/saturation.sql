-- The fraction of all positions whose rollout distance lies above the saturation threshold.
select study, model, split, stratum, action, saturation
from internal.stratum_moments
