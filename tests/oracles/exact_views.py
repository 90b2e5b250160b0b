"""A formula for each column of each view in terms of pooled moments, for exact and for sampled moments.

A formula takes moments by their name (``exact_moments``), arrays of any shape or complex numbers, of one action or of
two (baseline a, action b). A ratio keeps its denominator, so that an undefined ratio shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvdrift.schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.windows import Windows

Moments = Callable[[str], Any]  # a moment by its name; KeyError over an empty window
Formula = Callable[..., Any]  # of one Moments, or of two


@dataclass(frozen=True)
class Column:
    """numerator / denominator; ``undefined`` is the value if the denominator is 0, null if a moment's window is empty.

    ``bounds`` clips the value.
    """

    numerator: Formula
    denominator: Formula = lambda *_: 1.0
    undefined: float | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)


@dataclass(frozen=True)
class Line:
    """One row of a view: its grain beyond document or stratum and actions, its estimates, and its other columns."""

    grain: dict[str, Any]
    columns: dict[str, Column]
    exactly: dict[str, Any] = field(default_factory=dict)


def mean(name: str, scale: float = 1.0) -> Column:
    return Column(lambda m: scale * m(name))


def ratio(above: str, below: str, scale: float = 1.0) -> Column:
    return Column(lambda m: scale * m(above), lambda m: m(below))


def total(m: Moments, names: Iterator[str]) -> Any:
    """Sum of moments; 0.0 of none."""
    return sum((m(name) for name in names), 0.0)


# --------------------------------------------------------------------------------------------- one document, one action


def document_lines(view: str, windows: Windows) -> list[Line]:
    """The rows of a view of document moments."""
    positions, lags = range(1, windows.horizon + 1), range(1, windows.cohort_bound + 1)
    if view == "moments":
        return [Line({}, {name: mean(name) for name in SCALAR_MOMENTS})]
    if view == "position_moments":
        return [Line({"t": t}, {name: mean(f"{name}@{t}") for name in POSITION_MOMENTS}) for t in positions]
    if view == "lag_moments":
        return [
            Line({"lag": j}, {"cohort": mean("cohort")} | {name: mean(f"{name}@{j}") for name in LAG_MOMENTS})
            for j in lags
        ]
    return [Line({"depth": depth}, {name: mean(f"{name}@{depth}") for name in _DEPTHS}) for depth in positions]


_DEPTHS = ("observed", "capacity")
DOCUMENT_VIEWS = ("moments", "position_moments", "lag_moments", "depth_moments")


# ----------------------------------------------------------------------------------------- pooled documents, one action


def action_lines(view: str, windows: Windows, weights: list[float]) -> list[Line]:
    """The rows of a view of one action, over documents of these weights."""
    return list(_ACTION_VIEWS[view](windows, weights))


def _stratum_moments(_: Windows, weights: list[float]) -> Iterator[Line]:
    yield Line({}, {name: mean(name) for name in SCALAR_MOMENTS}, {"documents": len(weights)})


def _decomposition(windows: Windows, weights: list[float]) -> Iterator[Line]:
    columns = {name: mean(name) for name in ("mismatch", "rollout_tv", "fixed_history_tv", "exposure", "occupation")}
    columns |= {
        "occurrence": mean("diverged", 1 / windows.horizon),
        "mismatch_rate": Column(lambda m: m("occupation"), lambda m: m("exposure"), undefined=0.0),
        "divergence_probability": mean("diverged"),
        "mean_entry": ratio("entry", "diverged"),
        "written": mean("written"),
        "mismatch_written": ratio("mismatch", "written"),
        "exposure_written": ratio("written_exposure", "written"),
    }
    yield Line({}, columns, {"documents": len(weights)})


def _entry(windows: Windows, _: list[float]) -> Iterator[Line]:
    for t in range(1, windows.horizon + 1):

        def before(m: Moments, t: int = t) -> Any:
            return total(m, (f"first_mismatch@{s}" for s in range(1, t)))

        def survival(m: Moments, t: int = t) -> Any:
            later = total(m, (f"first_mismatch@{s}" for s in range(t, windows.horizon + 1)))
            return 1.0 - m("diverged") + later

        def now(m: Moments, t: int = t) -> Any:
            return m(f"first_mismatch@{t}")

        columns = {
            "p": Column(now),
            "entry_cdf": Column(lambda m, before=before, now=now: before(m) + now(m)),
            "survival": Column(survival),
            "hazard": Column(now, survival),
        }
        yield Line({"t": t}, columns)


def _generation_clock(windows: Windows, _: list[float]) -> Iterator[Line]:
    for t in range(1, windows.horizon + 1):
        yield Line({"t": t}, {name: mean(f"{name}@{t}") for name in ("delta", "f", "mismatch")})


def _blocks(windows: Windows) -> list[tuple[int, int]]:
    bounds = (0, windows.first_block_last, windows.second_block_last, windows.horizon)
    return [(bounds[number] + 1, bounds[number + 1]) for number in range(3)]


def _generation_blocks(windows: Windows, _: list[float]) -> Iterator[Line]:
    for block, (first, last) in enumerate(_blocks(windows), start=1):
        columns = {name: mean(f"block_{block}_{name}") for name in ("delta", "f", "mismatch")}
        yield Line({"block": block}, columns, {"block_first": first, "block_last": last})


def _branch_clock(windows: Windows, _: list[float]) -> Iterator[Line]:
    moment_of = {"delta": "cohort_delta", "mismatch": "cohort_mismatch", "pre_eos_fraction": "cohort_pre_eos"}
    for j in range(1, windows.cohort_bound + 1):
        yield Line({"lag": j}, {name: ratio(f"{moment}@{j}", "cohort") for name, moment in moment_of.items()})


def _branch_windows(windows: Windows, _: list[float]) -> Iterator[Line]:
    columns = {
        "cohort_fraction": mean("cohort"),
        "late_minus_early": Column(lambda m: m("late_delta") - m("early_delta"), lambda m: m("cohort")),
        "late_minus_early_pre_eos": Column(
            lambda m: (
                m("late_pre_eos_delta") * m("early_pre_eos_steps") - m("early_pre_eos_delta") * m("late_pre_eos_steps")
            ),
            lambda m: m("late_pre_eos_steps") * m("early_pre_eos_steps"),
        ),
    }
    lags = {"early": windows.early_last, "late": windows.cohort_bound - windows.late_first + 1}
    for name, count in lags.items():
        columns[name] = ratio(f"{name}_delta", "cohort")
        columns[f"{name}_pre_eos"] = ratio(f"{name}_pre_eos_delta", f"{name}_pre_eos_steps")
        # Steps of an empty window are 0, but there is no fraction of them.
        steps = f"{name}_pre_eos_steps" if count else "no such moment"
        columns[f"{name}_pre_eos_fraction"] = ratio(steps, "cohort", 1 / max(count, 1))
    yield Line({}, columns)


def _local_agreement(_: Windows, __: list[float]) -> Iterator[Line]:
    yield Line({}, {name: ratio(name, "cohort") for name in ("long_agreement", "mismatch_after_agreement")})


def _saturation(_: Windows, __: list[float]) -> Iterator[Line]:
    yield Line({}, {"saturation": mean("saturation")})


def _eos_partition(_: Windows, __: list[float]) -> Iterator[Line]:
    for r in range(4):
        yield Line({"eos_set": r}, {"gap": mean(f"eos_gap_{r}")})


def _branch_profile(windows: Windows, _: list[float]) -> Iterator[Line]:
    for s in range(1, windows.horizon + 1):
        for j in range(windows.horizon - s + 1):
            columns = {"p": mean(f"first_mismatch@{s}"), "rho": ratio(f"branch@{s},{j}", f"first_mismatch@{s}")}
            yield Line({"s": s, "j": j}, columns)


def _identified_interval(windows: Windows, weights: list[float]) -> Iterator[Line]:
    for depth in range(1, windows.horizon + 1):
        below, above, whole = (f"observed@{depth}", f"capacity@{depth}", f"observed@{windows.horizon}")
        yield Line(
            {"depth": depth},
            interval_columns(below, above, lambda m, below=below, whole=whole: m(whole) - m(below), weights),
            {"documents": len(weights), "level": 0.95},
        )


def interval_columns(below: str, above: str, tail: Formula, weights: list[float]) -> dict[str, Column]:
    """The columns of ``identified_interval`` from the moments Z_L and W_L and the realized tail."""
    epsilon = math.sqrt(math.log(4 / 0.05) * math.fsum(weight**2 for weight in weights) / 2)
    return {
        "observed": mean(below),
        "capacity": mean(above),
        "lower": mean(below),
        "upper": Column(lambda m: m(below) + m(above)),
        "midpoint": Column(lambda m: m(below) + m(above) / 2),
        "half_width": mean(above, 0.5),
        "realized_tail": Column(tail),
        "enclosure_low": Column(lambda m: m(below) - epsilon, bounds=(0.0, 1.0)),
        "enclosure_high": Column(lambda m: m(below) + m(above) + epsilon, bounds=(0.0, 1.0)),
    }


_ACTION_VIEWS: dict[str, Callable[[Windows, list[float]], Iterator[Line]]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _stratum_moments, _decomposition, _entry, _generation_clock, _generation_blocks, _branch_clock, _branch_windows,
        _local_agreement, _saturation, _eos_partition, _branch_profile, _identified_interval,
    )
}  # fmt: skip
ACTION_VIEWS = tuple(_ACTION_VIEWS)


# ----------------------------------------------------------------------------------- pooled documents, baseline, action


def contrast_lines(view: str, windows: Windows, weights: list[float]) -> list[Line]:
    """The rows of a view of two actions; formulas take moments of the baseline and of the action."""
    return list(_CONTRAST_VIEWS[view](windows, {"documents": len(weights)}))


def difference(name: str) -> Column:
    return Column(lambda a, b: b(name) - a(name))


def _paired_moments(_: Windows, count: dict[str, Any]) -> Iterator[Line]:
    yield Line({}, {name: Column(lambda _, b, name=name: b(name)) for name in SCALAR_MOMENTS}, count)


def _contrasts(windows: Windows, count: dict[str, Any]) -> Iterator[Line]:
    def rate(m: Moments) -> Any:
        return m("occupation") / m("exposure")

    def gap(a: Moments, b: Moments) -> Any:
        return b("mismatch") - a("mismatch")

    terms: dict[str, Formula] = {
        "occurrence": lambda a, b: (b("diverged") - a("diverged")) / windows.horizon,
        "exposure": lambda a, b: (b("exposure") - a("exposure")) * (rate(a) + rate(b)) / 2,
        "rate": lambda a, b: (rate(b) - rate(a)) * (a("exposure") + b("exposure")) / 2,
    }
    columns = {"gap": Column(gap)}
    for name, term in terms.items():
        columns[f"{name}_term"] = Column(term)
        columns[f"{name}_share"] = Column(term, gap)
    columns["written_difference"] = difference("written")
    for name, above in {"mismatch": "mismatch", "exposure": "written_exposure"}.items():
        columns[f"{name}_written_difference"] = Column(
            lambda a, b, above=above: b(above) / b("written") - a(above) / a("written")
        )
    yield Line({}, columns, count)


def _gap_change() -> Column:
    return Column(
        lambda a, b: b("block_3_delta") - a("block_3_delta") - (b("block_1_delta") - a("block_1_delta"))
    )  # fmt: skip


def _generation_gaps(windows: Windows, count: dict[str, Any]) -> Iterator[Line]:
    for block, (first, last) in enumerate(_blocks(windows), start=1):
        columns = {"gap": difference(f"block_{block}_delta"), "generation_gap_change": _gap_change()}
        yield Line({"block": block}, columns, count | {"block_first": first, "block_last": last})


def _generation_gap_change(_: Windows, count: dict[str, Any]) -> Iterator[Line]:
    columns = {
        f"{name}_gap": difference(f"block_{block}_delta") for block, name in enumerate(("first", "middle", "last"), 1)
    }
    yield Line({}, columns | {"generation_gap_change": _gap_change()}, count)


def _eos_contrasts(_: Windows, count: dict[str, Any]) -> Iterator[Line]:
    def history(a: Moments, b: Moments) -> Any:
        return b("rollout_tv") - b("fixed_history_tv") - (a("rollout_tv") - a("fixed_history_tv"))

    def related(a: Moments, b: Moments) -> Any:
        return sum((b(f"eos_gap_{r}") - a(f"eos_gap_{r}") for r in (1, 2, 3)), 0.0)

    columns = {
        "history_gap": Column(history),
        "pre_eos": difference("eos_gap_0"),
        "eos_related": Column(related),
        "eos_share": Column(related, history),
    }
    yield Line({}, columns, count)


def _action_ordering(windows: Windows, count: dict[str, Any]) -> Iterator[Line]:
    for depth in range(1, windows.horizon + 1):
        below, above = f"observed@{depth}", f"capacity@{depth}"
        columns = {
            "contrast_low": Column(lambda a, b, z=below, w=above: b(z) - a(z) - a(w)),
            "contrast_high": Column(lambda a, b, z=below, w=above: b(z) + b(w) - a(z)),
        }
        yield Line({"depth": depth}, columns, count)


_CONTRAST_VIEWS: dict[str, Callable[[Windows, dict[str, Any]], Iterator[Line]]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _paired_moments, _contrasts, _generation_gaps, _generation_gap_change, _eos_contrasts, _action_ordering,
    )
}  # fmt: skip
CONTRAST_VIEWS = tuple(_CONTRAST_VIEWS)
