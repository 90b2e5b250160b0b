"""Actions: a study's selectors with their parameters and retention, and the control that every study runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from generator.selectors import SELECTORS, Full, Selector
from schema.errors import InputError, nearest
from schema.retention import Retention
from schema.study import CONTROL_ACTION, ActionSection, Study


@dataclass(frozen=True)
class Action:
    """One selector with its parameters and retention."""

    name: str
    selector_name: str
    selector: Selector
    retention: Retention

    @property
    def control(self) -> bool:
        """True for the full-retention control, whose delta and f must be exactly 0."""
        return self.name == CONTROL_ACTION

    def row(self, study: str, *, prespecified: bool) -> dict[str, Any]:
        """The action's row of the ``actions`` table."""
        return {
            "study": study,
            "action": self.name,
            "selector": self.selector_name,
            "keep": str(self.retention),
            "window": self.selector.window,
            "sinks": self.selector.sinks,
            "position_mode": "continued from the prompt's true length",
            "control": self.control,
            "prespecified": prespecified,
            **self.selector.identity(),
        }


def build_action(section: ActionSection) -> Action:
    """An action from its section of the study file; InputError for an unknown selector or parameter."""
    if section.selector not in SELECTORS:
        hint = nearest(section.selector, SELECTORS)
        raise InputError(f"action '{section.name}': unknown selector '{section.selector}'; {hint}")
    selector = SELECTORS[section.selector]
    if selector is Full and section.retention.rule is not None:
        raise InputError(f"action '{section.name}': selector 'full' keeps every entry; write keep = \"all\"")
    accepted = {field.name for field in fields(selector)}  # type: ignore[arg-type]  # every selector is a dataclass
    for parameter in section.parameters:
        if parameter not in accepted:
            raise InputError(
                f"action '{section.name}': selector '{section.selector}' has no parameter '{parameter}'; "
                f"it takes {', '.join(sorted(accepted)) or 'none'}"
            )
    try:
        return Action(section.name, section.selector, selector(**section.parameters), section.retention)
    except InputError as error:
        raise InputError(f"action '{section.name}': {error}") from None


def build_actions(study: Study) -> list[Action]:
    """The study's actions in the file's order, then the control."""
    control = Action(CONTROL_ACTION, "full", Full(), Retention(None))
    return [*(build_action(section) for section in study.actions), control]
