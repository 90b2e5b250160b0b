"""The frozen plan as readable rows, whatever its JSON holds: a key per line, a list of objects as a small table.

What was chosen stands first and hashes last; the primary endpoints and the cost curve have a table and a figure of
their own where they have the fields that these need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from report.printing.blocks import Cell, Column, Row, Table, label_column, text_cell
from report.printing.canvas import INK, QUIET, new_figure
from report.printing.numbers import MISSING, count, duration, fixed
from report.printing.strokes import WIDTH
from report.reading.quantities import Unit, known_quantity

_FIRST = ("replicates", "documents_per_stratum", "baseline", "actions", "target_half_width", "reachable", "reason",
          "alpha", "family_size", "level", "draws", "exploratory_draws", "expected_seconds")  # fmt: skip
_CHOSEN = {name.replace("_", " ") for name in _FIRST} | {"expected time"}
_ENDPOINTS = "primary_endpoints"
_CURVE = "cost_curve"
_CURVE_FIELDS = ("replicates", "documents_per_stratum", "widest_half_width", "seconds")


@dataclass(frozen=True)
class PlanRow:
    """A key with its value as text, or with a table of objects."""

    key: str
    text: str = ""
    heads: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()

    @property
    def chosen(self) -> bool:
        """Whether it is what the plan decided, and not what it was decided from."""
        return self.key in _CHOSEN


def plan_rows(content: Any) -> list[PlanRow]:
    """Rows of any JSON value: what was chosen first, hashes last; nested keys are joined with ›."""
    if not isinstance(content, dict):
        return _rows(content, "plan")
    elsewhere = {_ENDPOINTS} if plan_endpoints(content) else set()
    if _CURVE in content and len(cost_curve(content)) == len(content[_CURVE]):
        elsewhere.add(_CURVE)
    ordered = {name: content[name] for name in _FIRST if name in content} | content
    rows = _rows({name: value for name, value in ordered.items() if name not in elsewhere}, "")
    return sorted(rows, key=lambda row: row.key.endswith("sha256"))


def plan_text(value: Any) -> str:
    """A value on one line."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−", 1) if value < 0 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(plan_text(entry) for entry in value) or MISSING
    if isinstance(value, dict):
        return "; ".join(f"{name}: {plan_text(entry)}" for name, entry in value.items()) or MISSING
    return str(value)


def plan_endpoints(content: Any) -> Table | None:
    """Primary endpoints with what development says of each: value, spreads, and the half-width that the plan expects.

    The spreads are the square roots of the plan's variance components, in the endpoint's own unit.
    """
    entries = content.get(_ENDPOINTS) if isinstance(content, dict) else None
    if not entries or not all(isinstance(entry, dict) and "quantity" in entry for entry in entries):
        return None
    rows = []
    for entry in entries:
        known = known_quantity(entry["quantity"])
        unit = known.unit if known else Unit.PERCENT
        against = entry.get("baseline")
        stored = (
            entry.get("development_value"),
            _root(entry.get("variance_between_documents")),
            _root(entry.get("variance_between_replicates")),
            entry.get("expected_half_width"),
        )
        spread = "pp" if unit is Unit.PERCENT else unit.sign
        signs = (unit.sign, spread, spread, spread)
        numbers = [
            Cell(MISSING if value is None else f"{fixed(value * unit.factor, 2)} {sign}")
            for value, sign in zip(stored, signs, strict=True)
        ]
        label = Cell(entry["quantity"], known.label if known else "", left=True)
        action = str(entry.get("action", MISSING))
        rows.append(Row((label, text_cell(f"{action} − {against}" if against else action), *numbers)))
    columns = (
        label_column("endpoint"),
        label_column("action"),
        Column("development", "", "value on development documents"),
        Column("sd, documents", "", "standard deviation between documents: variance component of the plan"),
        Column("sd, replicates", "", "standard deviation between replicates of a document"),
        Column("expected half-width", "", "of the interval, at the plan’s K and N"),
    )
    note = "From development documents, before any evaluation document; the spreads decided K and N."
    return Table("plan_endpoints", "Planned endpoints and variance components", columns, tuple(rows), note)


def cost_curve(content: Any) -> list[dict[str, Any]]:
    """The points of the plan's cost curve that have all their numbers, by K."""
    entries = content.get(_CURVE) if isinstance(content, dict) else None
    kept = [
        entry
        for entry in entries or []
        if isinstance(entry, dict) and all(isinstance(entry.get(name), int | float) for name in _CURVE_FIELDS)
    ]
    return sorted(kept, key=lambda entry: float(entry["replicates"]))


def cost_figure(content: dict[str, Any]) -> Figure:
    """Half-width and time that each K comes to with the N that it needs; the chosen K is filled."""
    curve = cost_curve(content)
    figure = new_figure(WIDTH, 3.0)
    widths, times = figure.subplots(1, 2)
    known = [known_quantity(entry["quantity"]) for entry in content.get(_ENDPOINTS) or [] if "quantity" in entry]
    tokens = any(quantity is not None and quantity.unit is Unit.TOKENS for quantity in known)
    factor = 1.0 if tokens else 100.0
    seconds = max(entry["seconds"] for entry in curve)
    scale, unit = next((s, name) for s, name in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
                       if seconds >= 2 * s or s == 1.0)  # fmt: skip
    panels = (
        (widths, "a  Widest half-width", "" if tokens else "percentage points", "widest_half_width", factor),
        (times, "b  Expected time", unit, "seconds", 1 / scale),
    )
    for axes, title, label, name, times_by in panels:
        x = [entry["replicates"] for entry in curve]
        y = [entry[name] * times_by for entry in curve]
        axes.plot(x, y, color=QUIET, linewidth=1.2)
        for entry, height in zip(curve, y, strict=True):
            chosen = entry["replicates"] == content.get("replicates")
            axes.plot([entry["replicates"]], [height], marker="o", markersize=6.5, color=INK,
                      markerfacecolor=INK if chosen else "white")  # fmt: skip
            axes.annotate(f"N {count(entry['documents_per_stratum'])}", (entry["replicates"], height), (0, 8),
                          textcoords="offset points", ha="center", fontsize=8, color=QUIET)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [count(value) for value in x], minor=False)
        axes.minorticks_off()
        axes.margins(x=0.08, y=0.25)
        axes.set_title(title)
        axes.set_ylabel(label)
        axes.set_xlabel("replicates K")
    target = content.get("target_half_width")
    if isinstance(target, int | float):
        widths.axhline(target * factor, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)))
        place = widths.get_yaxis_transform()
        widths.text(0.995, target * factor, "target", transform=place, ha="right", va="bottom", fontsize=8, color=QUIET)
    return figure


def cost_curve_table(content: Any) -> Table | None:
    """The cost curve as rows; None where there are fewer than two points."""
    curve = cost_curve(content)
    if len(curve) < 2:
        return None
    rows = tuple(
        Row((
            Cell(count(entry["replicates"])),
            Cell(count(entry["documents_per_stratum"])),
            Cell(plan_text(float(entry["widest_half_width"]))),
            Cell(duration(entry["seconds"])),
            Cell(plan_text(entry.get("reachable"))),
        ))
        for entry in curve
    )  # fmt: skip
    columns = (Column("K"), Column("N per stratum"), Column("widest half-width", "", "fraction, or tokens"),
               Column("expected time"), Column("all targets met"))  # fmt: skip
    return Table("cost_curve", "Cost curve", columns, rows, records=tuple(curve))


def _rows(content: Any, key: str) -> list[PlanRow]:
    if isinstance(content, dict):
        if not content:
            return [PlanRow(key, MISSING)]
        return [row for name, value in content.items() for row in _rows(value, _join(key, name))]
    if isinstance(content, list) and content and all(isinstance(entry, dict) for entry in content):
        return [_table(key, content)]
    if isinstance(content, int | float) and key.endswith("seconds"):
        return [PlanRow(f"{key.removesuffix('seconds')}time".strip(), duration(content))]
    return [PlanRow(key, plan_text(content))]


def _table(key: str, entries: list[dict[str, Any]]) -> PlanRow:
    heads = tuple(dict.fromkeys(name for entry in entries for name in entry))
    lines = tuple(tuple(plan_text(entry.get(name)) for name in heads) for entry in entries)
    return PlanRow(key, "", tuple(_words(head) for head in heads), lines)


def _root(value: Any) -> float | None:
    return float(value) ** 0.5 if isinstance(value, int | float) and value >= 0 else None


def _join(key: str, name: str) -> str:
    return f"{key} › {_words(name)}" if key else _words(name)


def _words(name: str) -> str:
    return name.replace("_", " ")
