"""Work in the form for another process: with actions by name, since a selector may come from a study's own module."""

from __future__ import annotations

from kvdrift.generator.actions import build_actions
from kvdrift.generator.generation import PendingUnit, StudyLaw, Work
from kvdrift.schema.document import Document
from kvdrift.schema.study import Study

NamedPart = list[tuple[Document, list[tuple[str, int, int, str, int, StudyLaw | None]]]]
"""Documents, each with its pending units, whose actions are names."""


def named(part: Work) -> NamedPart:
    """Replace the actions of some work by their names."""
    return [
        (
            document,
            [(unit.action.name, unit.first, unit.count, unit.estimator, unit.revision, unit.of) for unit in units],
        )
        for document, units in part
    ]


def with_actions(study: Study, part: NamedPart) -> Work:
    """Rebuild the actions that work names, from the study and the modules beside its file."""
    actions = {action.name: action for action in build_actions(study)}
    return [
        (
            document,
            [
                PendingUnit(actions[name], first, count, estimator, revision, of)
                for name, first, count, estimator, revision, of in units
            ],
        )
        for document, units in part
    ]
