"""Check exact equalities in the events of units: the first token, and actions that keep everything."""

from __future__ import annotations

from collections.abc import Sequence

from generator.checks.check import require
from log.store import Unit


def first_token_found(units: Sequence[Unit]) -> str:
    """Check that units of one prompt, the control's too, have equal first tokens; return the result's line."""
    firsts = [[row for row in unit.events.to_pylist() if row["t"] == 1] for unit in units]
    tokens = {tuple(row[side] for row in rows) for rows in firsts for side in ("x_token", "y_token")}
    require(len(tokens) == 1, "the first tokens are not the control's")
    moved = {row[name] for rows in firsts for row in rows for name in ("delta", "f")} - {0.0}
    require(not moved, "delta or f is not 0 at t = 1")
    return "delta = f = 0 at t = 1, and the control's token"


def require_unmoved(unit: Unit, name: str) -> None:
    """Raise an error unless delta and f of a unit are 0 in every event."""
    moved = sum(row["delta"] != 0 or row["f"] != 0 for row in unit.events.to_pylist())
    require(moved == 0, f"{name}: delta or f is not 0 in {moved} of {unit.events.num_rows} events")
