"""The sections of the page, in its order.

A new section is a module of ``report.parts`` with a function ``section(content)``, and its place here. The function
returns None where the page does not have the section.
"""

from __future__ import annotations

from collections.abc import Callable

from report.parts import (
    answers,
    branching,
    calibration,
    clocks,
    depth,
    entry,
    eos,
    examples,
    gap,
    plan,
    positions,
    reference,
    study,
    systems,
)
from report.parts.sequential import looks
from report.printing.section import Section
from report.reading.content import PageContent

SECTIONS: tuple[Callable[[PageContent], Section | None], ...] = (
    study.section, positions.decomposition, answers.section, entry.section, gap.section, clocks.section, eos.section,
    positions.saturation, depth.section, branching.section, systems.section, calibration.section, plan.section,
    looks.section, examples.section, reference.definitions, reference.provenance,
)  # fmt: skip
