"""The parts of the page and their sections, in the page's order.

A new section is a module of ``kvdrift.report.parts`` with a function ``section(content)``, and its place here. The
function returns None if the page is to omit the section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvdrift.report.parts import (
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
    residual_branching,
    sequential_looks,
    study,
    systems,
)
from kvdrift.report.parts.answers import section as answers
from kvdrift.report.parts.verdict import section as verdict
from kvdrift.report.parts.verdict import sweeps
from kvdrift.report.printing.section import Section
from kvdrift.report.reading.content import PageContent

Make = Callable[[PageContent], Section | None]


@dataclass(frozen=True)
class Part:
    """A part of the page."""

    name: str  # its anchor
    title: str  # its heading; empty for the first part, which is the page's first screen
    # the functions that make its sections, each with the question that the section answers
    sections: tuple[tuple[Make, str], ...]
    folded: bool = False  # whether its sections are closed until they are opened or printed; each shows its question


PARTS: tuple[Part, ...] = (
    Part("first", "", ((verdict.section, ""), (sweeps.section, ""))),
    Part(
        "why",
        "Why",
        (
            (verdict.contrasts, "What does each action do?"),
            (answers.section, "Does it cost right answers?"),
            (positions.decomposition, "How often do tokens differ, from when on, and for how long?"),
            (entry.section, "When do the two continuations part?"),
            (gap.section, "Is the difference one of time or of rate?"),
            (clocks.section, "Does divergence grow with position, or with time since it began?"),
            (examples.section, "What does it look like?"),
        ),
    ),
    Part(
        "specialists",
        "For specialists",
        (
            (reference.definitions, "What does each symbol mean?"),
            (study.section, "What was run, on which documents, and with how many bytes?"),
            (plan.section, "What was fixed before the evaluation, and what came of it?"),
            (sequential_looks.section, "Where did this sequential study stop?"),
            (eos.section, "How much of the difference is only that one text is shorter?"),
            (positions.saturation, "Where do the two laws have nothing in common?"),
            (depth.section, "What does a short window after the first mismatch say of R?"),
            (residual_branching.section, "Where is another estimator of R cheaper?"),
            (systems.section, "Are estimates right where R is known?"),
            (calibration.section, "Can a cheaper observation replace R?"),
        ),
        folded=True,
    ),
    Part("end", "", ((reference.provenance, ""),)),
)
