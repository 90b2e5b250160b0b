"""The sentence below a section's first figure, or above its first table: the result that the estimates show there.

Estimates decide which action is least or largest; intervals decide which are above or below 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdrift.report.printing.numbers import in_text, listed
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.stats.quantities import ALL_QUANTITIES

_NAMED = 3  # most actions that a sentence names


def span(content: PageContent, names: Mapping[str, str], x: int | None = None) -> str:
    """Return a sentence with the least and the largest estimate of quantities; empty if all are unknown.

    ``names`` has the words for each quantity. Noise floors are left out if there are other actions.
    """
    clauses = [_span(content, quantity, name, x) for quantity, name in names.items()]
    known = [clause for clause in clauses if clause]
    return f"{'; '.join(known)}." if known else ""


def _span(content: PageContent, quantity: str, name: str, x: int | None) -> str:
    actions = [action for action in content.actions if action not in content.facts.noise_floors] or content.actions
    rows = [content.estimates.get(quantity, action, x=x) for action in actions]
    known = sorted((row for row in rows if row.estimate is not None), key=lambda row: (row.estimate, row.action))
    if not known:
        return ""
    scale = ALL_QUANTITIES[quantity].scale
    least, largest = (in_text(row, scale) for row in (known[0], known[-1]))
    if len(known) == 1:
        return f"{name} is {least} under {known[0].action}"
    return f"{name} is least under {known[0].action}, {least}, and largest under {known[-1].action}, {largest}"


def signs(content: PageContent, quantity: str, name: str, baseline: str | None = None) -> str:
    """Return a sentence with the actions whose interval is above 0, below 0, or includes 0; empty without intervals."""
    actions = content.actions if baseline is None else content.others
    rows = [content.estimates.get(quantity, action, baseline) for action in actions]
    groups: dict[str, list[str]] = {"above 0": [], "below 0": [], "undecided": []}
    for row in rows:
        if row.has_interval:
            groups[_side(row)].append(row.action)
    return sentence(f"{name} is", groups)


def sentence(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return ``NAME GROUP for a and b; GROUP for c.`` without empty groups; an empty text if all groups are empty."""
    clauses = [f"{group} for {_named(actions)}" for group, actions in groups.items() if actions]
    return f"{name} {'; '.join(clauses)}." if clauses else ""


def _side(row: Estimate) -> str:
    if not row.excludes_zero():
        return "undecided"
    return "above 0" if (row.low or 0.0) > 0 else "below 0"


def _named(actions: Sequence[str]) -> str:
    if len(actions) <= _NAMED:
        return listed(actions)
    return listed([*actions[: _NAMED - 1], f"{len(actions) - _NAMED + 1} more"])
