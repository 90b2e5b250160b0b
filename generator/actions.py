"""Actions: a study's selectors with their parameters and retentions, and the control that every study has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.attention.holding import AsComputed, Holding
from generator.selectors import Full, Numerics, Selector, build_selector
from schema.errors import InputError
from schema.retention import Retention
from schema.study import CONTROL_ACTION, FINITE_STATE, ActionSection, Study


@dataclass(frozen=True)
class Action:
    """One selector with its parameters and retention."""

    name: str
    selector_name: str
    selector: Selector
    retention: Retention

    @property
    def control(self) -> bool:
        """Whether this is the full-retention control, whose delta and f must be exactly 0."""
        return self.name == CONTROL_ACTION

    @property
    def holding(self) -> Holding:
        """How the compressed side holds what the selector keeps."""
        return self.selector.holding if isinstance(self.selector, Numerics) else AsComputed()

    @property
    def prefill_chunk(self) -> int | None:
        """How many tokens a prefill of its own takes at once; None where it keeps entries of the reference's prompt."""
        return self.selector.prefill_chunk if isinstance(self.selector, Numerics) else None

    @property
    def row_tile(self) -> int | None:
        """How many rows read its cache at once, at most; None for as many as of others."""
        return (self.selector.row_tile or None) if isinstance(self.selector, Numerics) else None

    def kept_entries(self, entries: int, where: str) -> int:
        """How many of a prompt's n entries the action keeps: exactly m, or n where the retention is n or above.

        Raises:
            InputError: m cannot hold the selector's window and sinks.
        """
        kept = self.retention.kept(entries)
        if kept >= entries:
            return entries
        window, sinks = self.selector.window, self.selector.sinks
        if kept < (needed := max(window + sinks, 1)):
            raise InputError(
                f"action '{self.name}', {where}: keep = {self.retention} retains {kept} of {entries} prompt entries, "
                f"below the {needed} that its window ({window}) and sinks ({sinks}) need"
            )
        return kept

    def row(self, study: str, *, prespecified: bool, revision: int = 0) -> dict[str, Any]:
        """The action's row of the ``actions`` table."""
        identity = self.selector.identity()
        parameters = identity.pop("parameters")
        return {
            "study": study, "action": self.name, "selector": self.selector_name, "keep": str(self.retention),
            "window": self.selector.window, "sinks": self.selector.sinks,
            "position_mode": "continued from the prompt's true length", "control": self.control,
            "prespecified": prespecified, "parameters": json.dumps(parameters, sort_keys=True) if parameters else None,
            "action_revision": revision, "dropped": False,
            **identity,
        }  # fmt: skip


def build_action(section: ActionSection, folder: Path | None = None) -> Action:
    """Make an action from its section of a study file in ``folder``, where modules of its own are found.

    Raises:
        InputError: An unknown selector or parameter, or a value that the selector does not take.
    """
    try:
        selector = build_selector(section.selector, section.parameters, folder)
    except InputError as error:
        raise InputError(f"action '{section.name}': {error}") from error.__cause__
    if isinstance(selector, Full) and section.retention.rule is not None:
        line = f"action '{section.name}': selector '{section.selector}' keeps every entry"
        raise InputError(f'{line}; write keep = "all"')
    return Action(section.name, section.selector, selector, section.retention)


def build_actions(study: Study) -> list[Action]:
    """Make the study's actions in the file's order, and then the control.

    Raises:
        InputError: An unknown selector or parameter, or a value that a selector does not take.
    """
    control = Action(CONTROL_ACTION, "full", Full(), Retention(None))
    if study.model.kind == FINITE_STATE:  # an action is a law, and there is no prompt to keep entries of
        return [*(Action(section.name, FINITE_STATE, Full(), Retention(None)) for section in study.actions), control]
    return [*(build_action(section, study.folder) for section in study.actions), control]
