"""How well an observation that is cheaper than R predicts the gap: candidates, their errors, and the decisions."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from report.printing.blocks import Cell, Column, Table, label_column
from report.printing.blocks import Row as Line
from report.printing.canvas import INK, QUIET, new_figure
from report.printing.numbers import MISSING, count, decimals_of, fixed, level
from report.printing.strokes import WIDTH, published_handle, zero_line
from report.reading.published import PublishedStudy, PublishedVerdict
from report.reading.source import Row, StudyRows
from schema.windows import Windows

_CANDIDATES = {"stratum_action_mean": "cell mean", "flat": "flat, uncalibrated", "ridge": "ridge"}
_COLOURS = {"equivalent": "#0072b2", "different": "#d55e00"}


def read_calibration(source: StudyRows, actions: Sequence[str], baseline: str) -> list[Row]:
    """Every candidate's row for the contrasts to ``baseline``: by action, observation, candidate."""
    order = {action: place for place, action in enumerate(actions)}
    found = [row for row in source.of("calibration", baseline=baseline) if row["action"] in order]
    candidates = list(_CANDIDATES)
    return sorted(
        found,
        key=lambda row: (order[row["action"]], row["observation"], candidates.index(row["candidate"])),
    )


def calibration_table(rows: list[Row], baseline: str, windows: Windows, published: PublishedStudy) -> Table:
    """Every candidate of every observation and contrast: what it predicts, its error, the decision, its spread."""
    numbers = ("predicted_gap", "mae", "rmse")
    gaps = {row["action"]: f"ΔR = {_points(row['gap'], 2)} pp" for row in rows}
    places = {name: decimals_of([row[name] for row in rows], 100.0) for name in numbers} | {"error": 2}
    lines = [
        Line(
            (
                Cell(observation_label(row["observation"], windows), left=True),
                Cell(_CANDIDATES[row["candidate"]], "selected" if row["selected"] else "", left=True),
                Cell(_points(_root(row["cross_validated_mse"]), 2)),
                Cell(_points(row["predicted_gap"], places["predicted_gap"])),
                *_judged(row, places, published),
            ),
            f"{row['action']} − {baseline}: {gaps[row['action']]}",
        )
        for row in rows
    ]
    columns = (
        label_column("observation"),
        label_column("predictor"),
        Column("CV error", "pp", "root of the cross-validated mean squared error of document contrasts"),
        Column("predicted ΔR", "pp", "the contrast of token mismatch on evaluation documents, predicted"),
        Column("error", "pp", "ΔR less the prediction"),
        Column("decision", "", "equivalent inside the margin, different outside it, else unresolved"),
        Column("MAE", "pp", "mean absolute error of document contrasts"),
        Column("RMSE", "pp", "root mean squared error of document contrasts"),
    )
    return Table("calibration", f"Predicting the gap to {baseline}", columns, tuple(lines), _note(rows), tuple(rows))


def calibration_figure(rows: list[Row], windows: Windows, published: PublishedStudy) -> Figure:
    """Every candidate's error with its interval against the margin; the selected ones filled, with their decision."""
    several = len({row["action"] for row in rows}) > 1
    figure = new_figure(WIDTH, 1.3 + 0.3 * len(rows))
    axes = figure.add_subplot()
    margin = 100 * max(row["margin"] for row in rows)
    axes.axvspan(-margin, margin, color="#111827", alpha=0.07, linewidth=0)
    for place, row in enumerate(rows):
        _error(axes, row, place)
        printed = _printed(row, published)
        if printed is not None:
            axes.plot([100 * printed.error.value], [place], marker="D", markersize=7, markerfacecolor="none",
                      markeredgecolor=INK, markeredgewidth=1.1, zorder=4)  # fmt: skip
    labels = [
        f" {row['action']} · {observation_label(row['observation'], windows)} · {_CANDIDATES[row['candidate']]}"
        if several
        else f" {observation_label(row['observation'], windows)} · {_CANDIDATES[row['candidate']]}"
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    zero_line(axes, upright=True)
    axes.set_xlabel("error of the predicted gap, ΔR − prediction (percentage points)")
    band = Patch(color="#111827", alpha=0.07, linewidth=0, label=f"margin ±{fixed(margin, 0)} pp")
    handles: list[Patch | Line2D] = [band]
    if any(_printed(row, published) for row in rows):
        handles.append(published_handle("D"))
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def observation_label(observation: str, windows: Windows) -> str:
    """The observation in words; positions with their numbers."""
    if observation == "positions":
        return f"positions 1–{windows.first_block_last}"
    return observation.replace("_", " ")


def _error(axes: Axes, row: Row, place: int) -> None:
    if row["error"] is None:
        return
    colour = _COLOURS.get(row["decision"], QUIET)
    value, low, high = (100 * (row["error"] if row[end] is None else row[end]) for end in ("error", "low", "high"))
    spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar([value], [place], xerr=spread, fmt="o", color=colour, linewidth=1.3, capsize=3, markersize=5.5,
                  markerfacecolor=colour if row["selected"] else "white")  # fmt: skip
    if row["selected"]:
        axes.annotate(
            row["decision"] or "", (high, place), (7, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )


def _judged(row: Row, places: dict[str, int], published: PublishedStudy) -> list[Cell]:
    """Error with its interval, decision, MAE, RMSE; the paper's under the predictor that it selected."""
    printed = _printed(row, published)
    beside = dict.fromkeys(("error", "decision", "mae", "rmse"), "")
    if printed is not None:
        beside |= {"error": f"published {_points(printed.error.value, 2)}", "decision": f"published {printed.decision}"}
        beside |= {
            name: f"published {_points(value, 2)}"
            for name, value in (("mae", printed.mae), ("rmse", printed.rmse)) if value is not None
        }  # fmt: skip
    bounds = ""
    if row["low"] is not None and row["high"] is not None:
        bounds = f"[{_points(row['low'], places['error'])}, {_points(row['high'], places['error'])}]"
    return [
        Cell(_points(row["error"], places["error"]), bounds, published=beside["error"]),
        Cell(row["decision"] or MISSING, published=beside["decision"]),
        *(Cell(_points(row[name], places[name]), published=beside[name]) for name in ("mae", "rmse")),
    ]


def _printed(row: Row, published: PublishedStudy) -> PublishedVerdict | None:
    """What the paper prints for this contrast, observation and predictor."""
    found = published.verdicts.get((row["action"], row["baseline"], row["observation"]))
    return found if found is not None and found.candidate == row["candidate"] else None


def _note(rows: list[Row]) -> str:
    levels = " and ".join(level(value) for value in sorted({row["level"] for row in rows}))
    margins = " and ".join(fixed(100 * value, 0) for value in sorted({row["margin"] for row in rows}))
    documents = " and ".join(count(value) for value in sorted({row["documents"] for row in rows}))
    status = " and ".join(sorted({row["status"] for row in rows}))
    return f"{status.capitalize()}, {levels} intervals, margin ±{margins} pp, {documents} documents of both actions."


def _points(value: float | None, decimals: int) -> str:
    return fixed(None if value is None else 100 * value, decimals)


def _root(value: float | None) -> float | None:
    return None if value is None else float(value**0.5)
