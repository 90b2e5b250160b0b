"""The section on predictions of the gap from observations cheaper than R: candidates, errors, decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvdrift.report.figures.canvas import ACTION_COLOURS, INK, QUIET, SHADE, Axes, Figure, legend_patch, new_figure
from kvdrift.report.figures.strokes import WIDTH, published_handle, zero_line
from kvdrift.report.printing.estimate_tables import differences_table
from kvdrift.report.printing.numbers import MISSING, count, decimals_of, fixed, level, listed, sure_decimals
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent, PublishedStudy, PublishedVerdict
from kvdrift.report.reading.estimates import ViewRow
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.windows import Windows

_CANDIDATES = {"stratum_action_mean": "cell mean", "flat": "flat, uncalibrated", "ridge": "ridge"}
_COLOURS = {"equivalent": ACTION_COLOURS[0], "different": ACTION_COLOURS[1]}
_MOST = 24  # predictors in a figure; if there are more, only those that development selected are drawn
_UNCALIBRATED = (
    "rollout_tv_gap", "fixed_history_gap", "flat_extrapolation_gap", "full_minus_fixed_history",
    "full_minus_flat_extrapolation",
)  # fmt: skip


def section(content: PageContent) -> Section | None:
    """Make the section: the error of each predictor, and of observations without fitting; None without a contrast."""
    if not content.others:
        return None
    estimates, baseline, windows = content.estimates, content.baseline, content.windows
    rows, tables, drawings = read_calibration(content), [], []
    if rows:
        tables.append(calibration_table(rows, baseline, windows, content.published))
        words = "Error of each predictor of the gap with its interval against the margin"
        drawn = [row for row in rows if row["selected"]] if len(rows) > _MOST else rows
        drawings.append(Drawing("calibration", words, partial(calibration_figure, drawn, windows, content.published)))
    names = [name for name in _UNCALIBRATED if estimates.known(name)]
    if "flat_extrapolation_gap" in names:
        tables.append(differences_table("uncalibrated", "Uncalibrated predictions", content, names))
    values = {"chosen": len(rows) > _MOST}
    decisions = Counter(row["decision"] for row in rows if row["selected"] and row["decision"])
    clauses = listed([f"{count(decisions[decision])} are {decision}" for decision in sorted(decisions)])
    shows = f"Of {count(decisions.total())} selected predictors of the gap, {clauses}." if decisions else ""
    return Section("calibration", "Predicting the gap", tuple(tables), tuple(drawings), shows, values)


def read_calibration(content: PageContent) -> list[ViewRow]:
    """Return every candidate's row for the contrasts to the baseline, sorted by action, then by the error's size."""
    order = {action: place for place, action in enumerate(content.actions)}
    rows = [row for row in content.source.of("calibration", baseline=content.baseline) if row["action"] in order]

    def place(row: ViewRow) -> tuple[object, ...]:
        error = row["error"]
        return (
            order[row["action"]],
            error is None,
            abs(error or 0.0),
            row["observation"],
            list(_CANDIDATES).index(row["candidate"]),
        )

    return sorted(rows, key=place)


def calibration_table(rows: list[ViewRow], baseline: str, windows: Windows, published: PublishedStudy) -> PrintedTable:
    """Make the table of candidates, grouped by contrast: observation, predictor, prediction, errors and decision."""
    numbers = ("predicted_gap", "mae", "rmse")
    gaps = {row["action"]: f"ΔR = {_points(row['gap'], 2)} pp" for row in rows}
    places = {name: decimals_of([row[name] for row in rows], 100.0) for name in numbers} | {"error": 2}
    lines = [
        table_row(
            observation_label(row["observation"], windows),
            Cell(_CANDIDATES[row["candidate"]], "selected" if row["selected"] else ""),
            _points(_root(row["cross_validated_mse"]), 2),
            _points(row["predicted_gap"], places["predicted_gap"]),
            *_judged(row, places, published),
            group=f"{row['action']} − {baseline}: {gaps[row['action']]}",
        )
        for row in rows
    ]
    columns = (
        label_column("observation"),
        label_column("predictor"),
        Column("CV error", "pp", "root of the cross-validated mean squared error of document contrasts"),
        Column("predicted ΔR", "pp", "the contrast of token mismatch on evaluation documents, predicted"),
        Column("error", "pp", "ΔR less the prediction"),
        Column("decision", "", "equivalent: interval inside the margin; different: wholly outside; else unresolved"),
        Column("MAE", "pp", "mean absolute error of document contrasts"),
        Column("RMSE", "pp", "root mean squared error of document contrasts"),
    )
    title = f"Predicting the gap to {baseline}"
    return PrintedTable("calibration", title, columns, tuple(lines), _note(rows), tuple(rows))


def calibration_figure(rows: list[ViewRow], windows: Windows, published: PublishedStudy) -> Figure:
    """Draw every candidate's error and interval against the margin; selected candidates are filled."""
    several = len({row["action"] for row in rows}) > 1
    figure = new_figure(WIDTH, 1.3 + 0.3 * len(rows))
    axes = figure.add_subplot()
    margin = 100 * max(row["margin"] for row in rows)
    axes.axvspan(-margin, margin, color=SHADE, alpha=0.07, linewidth=0)
    for place, row in enumerate(rows):
        _error(axes, row, place, margin)
        if (printed := _printed(row, published)) is not None:
            axes.plot([100 * printed.errors["error"]], [place], marker="D", markersize=7, markerfacecolor="none",
                      markeredgecolor=INK, markeredgewidth=1.1, zorder=4)  # fmt: skip
    labels = [
        f" {row['action'] + ' · ' if several else ''}{observation_label(row['observation'], windows)} · "
        + _CANDIDATES[row["candidate"]]
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    zero_line(axes, upright=True)
    axes.set_xlabel("error of the predicted gap, ΔR − prediction (percentage points)")
    band = legend_patch(f"margin ±{fixed(margin, 0)} pp", color=SHADE, alpha=0.07, linewidth=0)
    printed_too = any(_printed(row, published) for row in rows)
    figure.legend(handles=[band, published_handle("D")] if printed_too else [band], loc="outside upper left", ncols=2)
    return figure


def observation_label(observation: str, windows: Windows) -> str:
    """Name an observation in words, as in ``positions 1–32``."""
    if observation == "positions":
        return f"positions 1–{windows.first_block_last}"
    return observation.replace("_", " ")


def _error(axes: Axes, row: ViewRow, place: int, margin: float) -> None:
    """Draw an error with its interval, and write a selected predictor's decision beside it, off the shaded margin."""
    if row["error"] is None:
        return
    colour = _COLOURS.get(row["decision"], QUIET)
    value, low, high = (100 * (row["error"] if row[end] is None else row[end]) for end in ("error", "low", "high"))
    spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar([value], [place], xerr=spread, fmt="o", color=colour, linewidth=1.3, capsize=3, markersize=5.5,
                  markerfacecolor=colour if row["selected"] else "white")  # fmt: skip
    if row["selected"]:
        axes.annotate(row["decision"] or "", (max(high, margin), place), (7, 0), textcoords="offset points",
                      va="center", fontsize=8, color=INK)  # fmt: skip


def _judged(row: ViewRow, places: dict[str, int], published: PublishedStudy) -> list[Cell]:
    """Return cells of error, decision, MAE and RMSE; the paper's numbers go under the predictor that it selected."""
    printed = _printed(row, published)
    beside: dict[str, str] = {}
    if printed is not None:
        beside = {name: f"published {_points(value, 2)}" for name, value in printed.errors.items()}
        beside["decision"] = f"published {printed.decision}"
    bounds = ""
    if row["low"] is not None and row["high"] is not None:
        decimals = sure_decimals(
            100 * row["low"], 100 * row["high"], row.get("level"), row.get("draws"), places["error"]
        )
        bounds = f"[{_points(row['low'], decimals)}, {_points(row['high'], decimals)}]"
    texts = {name: _points(row[name], places[name]) for name in ("error", "mae", "rmse")}
    texts["decision"] = row["decision"] or MISSING
    return [
        Cell(texts[name], bounds if name == "error" else "", published=beside.get(name, ""))
        for name in ("error", "decision", "mae", "rmse")
    ]


def _printed(row: ViewRow, published: PublishedStudy) -> PublishedVerdict | None:
    """Return the paper's result for this contrast, observation and predictor."""
    verdict = published.verdicts.get((row["action"], row["baseline"], row["observation"]))
    return verdict if verdict is not None and verdict.candidate == row["candidate"] else None


def _note(rows: list[ViewRow]) -> str:
    def joined(name: str, text: Callable[[Any], str]) -> str:
        return " and ".join(text(value) for value in sorted({row[name] for row in rows}))

    margins = joined("margin", lambda value: fixed(100 * value, 0))
    return (
        f"{joined('status', str).capitalize()}, {joined('level', level)} intervals, margin ±{margins} pp, "
        f"{joined('documents', count)} documents of both actions."
    )


def _points(value: float | None, decimals: int) -> str:
    return fixed(None if value is None else 100 * value, decimals)


def _root(value: float | None) -> float | None:
    return None if value is None else float(value**0.5)
