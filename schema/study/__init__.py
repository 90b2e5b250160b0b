"""Read and validate study files: TOML in, validated values out.

Every key states its meaning in its section: ``design``, ``model`` or ``actions``. ``whole`` has the checks that need
several sections, and ``reading`` reads a file.
"""

from kvdrift.schema.study.actions import (
    CONTROL_ACTION,
    CONTROL_REPLICATES,
    EXTERNAL,
    FLOOR_ACTION,
    KERNEL_FLOOR_ACTION,
    NUMERICS,
    ActionSection,
)
from kvdrift.schema.study.design import FIXED, DocumentsSection, PlanSection
from kvdrift.schema.study.model import (
    EXACT_TYPES,
    FINITE_STATE,
    HTTP,
    LLAMA_CPP,
    TRANSFORMER,
    TRANSFORMERS,
    ModelSection,
)
from kvdrift.schema.study.reading import load_studies
from kvdrift.schema.study.whole import POOLED, Study

__all__ = [
    "CONTROL_ACTION", "CONTROL_REPLICATES", "EXACT_TYPES", "EXTERNAL", "FINITE_STATE", "FIXED", "FLOOR_ACTION",
    "HTTP", "KERNEL_FLOOR_ACTION", "LLAMA_CPP", "NUMERICS", "POOLED", "TRANSFORMER", "TRANSFORMERS", "ActionSection",
    "DocumentsSection", "ModelSection", "PlanSection", "Study", "load_studies",
]  # fmt: skip
