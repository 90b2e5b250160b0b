"""The study file: what is measured, on what, and what the evaluation must reach. TOML in, validated values out.

One file a section, in which every key says what it means; ``whole`` has the checks that need several sections, and
``reading`` and ``mistakes`` read a file and say in a line what is wrong in it.
"""

from schema.study.actions import CONTROL_ACTION, CONTROL_REPLICATES, FLOOR_ACTION, NUMERICS, ActionSection
from schema.study.documents import DocumentsSection
from schema.study.model import FINITE_STATE, HTTP, TRANSFORMER, ModelSection
from schema.study.plan import FIXED, PlanSection
from schema.study.reading import load_studies
from schema.study.section import values_of
from schema.study.whole import POOLED, Study

__all__ = [
    "CONTROL_ACTION", "CONTROL_REPLICATES", "FINITE_STATE", "FIXED", "FLOOR_ACTION", "HTTP", "NUMERICS", "POOLED",
    "TRANSFORMER", "ActionSection", "DocumentsSection", "ModelSection", "PlanSection", "Study", "load_studies",
    "values_of",
]  # fmt: skip
