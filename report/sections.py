"""The sections of the page, in its order.

A new section is a module of ``report.parts`` with a function ``section(content)``, and its place here. The function
returns None where the page does not have the section.
"""

from __future__ import annotations

from collections.abc import Callable

from report.parts import (
    branching,
    calibration,
    clocks,
    decomposition,
    depth,
    entry,
    eos,
    examples,
    gap,
    plan,
    reference,
    saturation,
    study,
    systems,
)
from report.printing.section import Section
from report.reading.content import PageContent

SECTIONS: tuple[Callable[[PageContent], Section | None], ...] = (
    study.section, decomposition.section, entry.section, gap.section, clocks.section, eos.section, saturation.section,
    depth.section, branching.section, systems.section, calibration.section, plan.section, examples.section,
    reference.definitions, reference.provenance,
)  # fmt: skip
