"""The page, its figures and tables, from a synthetic study whose curves are known in closed form.

Each action diverges with a constant hazard λ and disagrees at rate C while exposed, so that O, E, R and the entry CDF
follow from (λ, C, H); intervals are the point ± a fixed part of it.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from report import Provenance, build_report
from report.canvas import action_styles
from report.facts import Windows
from report.latex import escape
from report.numbers import MISSING, count_range, duration, fixed, size
from report.plan_rows import plan_rows
from report.published import is_model
from report.quantities import POINT_VIEWS, QUANTITIES, known_quantity
from report.trajectories_text import visible
from schema.errors import InputError

STUDY, MODEL, H = "half-cache", "kvdrift/tiny", 64
BOUND, EARLY, LATE = 32, 8, 25
BLOCKS = ((1, 16), (17, 32), (33, 64))
HAZARD = {"snapkv-half": 0.018, "recent-half": 0.11, "snapkv-10": 0.14, "recent-10": 0.35, "knorm-half": 0.05,
          "chunk-half": 0.028}  # fmt: skip
STRATA = ("NIAH-4K", "NIAH-16K", "VT-4K")
CONTROL = "full"
Row = dict[str, Any]


class FakeViews:
    """Views as lists of rows, each with the columns that the real view has."""

    def __init__(self, views: dict[str, list[Row]]) -> None:
        self.views = views

    def rows(self, view: str, **equal: object) -> pa.Table:
        """Rows with equal columns."""
        rows = self.views[view]
        kept = [row for row in rows if all(row[column] == value for column, value in equal.items())]
        return pa.Table.from_pylist(kept) if kept else pa.table({})


def action_numbers(action: str, shift: float) -> dict[str, Any]:
    """Every quantity of one action; ``shift`` makes strata differ."""
    hazard = HAZARD.get(action, 0.06) * (1 + shift)
    rate = 0.86 + 0.2 * hazard
    p = [hazard * (1 - hazard) ** (s - 1) if s > 1 else 0.0 for s in range(1, H + 1)]
    diverged = sum(p)
    exposure = sum(p[s - 1] * (H - s) for s in range(1, H + 1)) / H
    mismatch = diverged / H + exposure * rate
    branch = [0.78 + 0.17 * (1 - 0.93**lag) - 0.1 * hazard for lag in range(1, BOUND + 1)]
    cdf = [sum(p[:t]) for t in range(1, H + 1)]
    delta = [value * rate for value in cdf]
    f = [0.35 * hazard / (0.1 + hazard) * (1 - 0.9**t) * (0.5 + 0.5 * 0.99**t) for t in range(1, H + 1)]
    early, late = sum(branch[:EARLY]) / EARLY, sum(branch[LATE - 1 :]) / EARLY
    forced = sum(f) / H
    history = mismatch - forced
    return {
        "mismatch": mismatch, "rollout_tv": mismatch * 1.004, "fixed_history_tv": forced,
        "occurrence": diverged / H, "exposure": exposure, "occupation": exposure * rate, "mismatch_rate": rate,
        "divergence_probability": diverged, "mean_entry": sum(s * p[s - 1] for s in range(1, H + 1)) / diverged,
        "saturation": mismatch * 0.6, "cohort_fraction": cdf[BOUND - 1], "early": early, "late": late,
        "late_minus_early": late - early, "early_pre_eos": early * 0.98, "late_pre_eos": late * 0.97,
        "late_minus_early_pre_eos": late * 0.97 - early * 0.98, "early_pre_eos_fraction": 0.91,
        "late_pre_eos_fraction": 0.34, "long_agreement": 0.04, "mismatch_after_agreement": 0.7,
        "eos_gap": {0: history * 0.7, 1: history * 0.1, 2: history * 0.2, 3: 0.0},
        "generation_block_delta": {n: mean(delta, block) for n, block in enumerate(BLOCKS, 1)},
        "generation_block_f": {n: mean(f, block) for n, block in enumerate(BLOCKS, 1)},
        "generation_block_mismatch": {n: mean(delta, block) for n, block in enumerate(BLOCKS, 1)},
        "entry_cdf": dict(enumerate(cdf, 1)), "survival": {t: 1 - value for t, value in enumerate(cdf, 1)},
        "hazard": dict.fromkeys(range(1, H + 1), hazard), "generation_delta": dict(enumerate(delta, 1)),
        "generation_f": dict(enumerate(f, 1)), "generation_mismatch": dict(enumerate(delta, 1)),
        "branch_delta": dict(enumerate(branch, 1)), "branch_mismatch": dict(enumerate(branch, 1)),
        "branch_pre_eos_fraction": {lag: 0.98**lag for lag in range(1, BOUND + 1)},
    }  # fmt: skip


def mean(values: list[float], block: tuple[int, int]) -> float:
    part = values[block[0] - 1 : block[1]]
    return sum(part) / len(part)


def contrast_numbers(b: dict[str, Any], a: dict[str, Any]) -> dict[str, Any]:
    terms = {
        "occurrence": b["occurrence"] - a["occurrence"],
        "exposure": (b["exposure"] - a["exposure"]) * (a["mismatch_rate"] + b["mismatch_rate"]) / 2,
        "rate": (b["mismatch_rate"] - a["mismatch_rate"]) * (a["exposure"] + b["exposure"]) / 2,
    }
    gap = b["mismatch"] - a["mismatch"]
    blocks = {n: b["generation_block_delta"][n] - a["generation_block_delta"][n] for n in (1, 2, 3)}
    parts = [b["eos_gap"][r] - a["eos_gap"][r] for r in range(4)]
    return {
        "gap": gap,
        **{f"{name}_term": value for name, value in terms.items()},
        **{f"{name}_share": value / gap if gap else None for name, value in terms.items()},
        "rollout_tv_gap": b["rollout_tv"] - a["rollout_tv"],
        "fixed_history_gap": b["fixed_history_tv"] - a["fixed_history_tv"],
        "flat_extrapolation_gap": blocks[1], "full_minus_fixed_history": gap * 0.5,
        "full_minus_flat_extrapolation": gap - blocks[1],
        "history_gap": sum(parts), "pre_eos": parts[0], "eos_related": sum(parts[1:]),
        "eos_share": sum(parts[1:]) / sum(parts) if sum(parts) else None,
        **{f"{name}_difference": b[name] - a[name] for name in ("mean_entry", "divergence_probability", "saturation")},
        "generation_gap": blocks, "generation_gap_change": blocks[3] - blocks[1],
    }  # fmt: skip


def estimate_rows(stratum: str, action: str, baseline: str | None, numbers: dict[str, Any]) -> list[Row]:
    rows = []
    for quantity, value in numbers.items():
        for x, number in value.items() if isinstance(value, dict) else [(None, value)]:
            planned = (quantity, stratum) in {("late_minus_early", "pooled"), ("saturation", "pooled")}
            planned = planned and action != "recent-10"
            status = "prespecified" if planned else "exploratory"
            spread = None if number is None else abs(number) * 0.08 + 0.002
            rows.append({
                "study": STUDY, "model": MODEL, "split": "evaluation", "stratum": stratum, "action": action,
                "baseline": baseline, "quantity": quantity, "x": x, "estimate": number,
                "low": None if number is None else number - spread,
                "high": None if number is None else number + spread,
                "level": 0.99375 if planned else 0.95, "draws": 10_000 if planned else 2_000, "documents": 24,
                "family": "primary" if planned else None, "status": status,
                "events_version": 7, "plan_sha256": "ab" * 32,
            })  # fmt: skip
    return rows


def make_views(actions: tuple[str, ...], *, strata: tuple[str, ...] = STRATA, analyzed: bool = True,
               planned: bool = True, split: str = "evaluation") -> FakeViews:  # fmt: skip
    keys = {"study": STUDY, "model": MODEL}
    numbers = {
        (stratum, action): action_numbers(action, shift)
        for shift, stratum in zip((0.0, *(0.1 * i - 0.1 for i in range(len(strata)))), ("pooled", *strata), strict=True)
        for action in actions
    }
    estimates = [
        row for (stratum, action), values in numbers.items() for row in estimate_rows(stratum, action, None, values)
    ]
    estimates += [
        row
        for (stratum, action), values in numbers.items()
        for other in actions if other != action
        for row in estimate_rows(stratum, action, other, contrast_numbers(values, numbers[stratum, other]))
    ]  # fmt: skip
    documents = [
        keys | {"doc": f"{stratum}/{part}/{i}", "split": part, "stratum": stratum, "task": "niah_single_1",
                "prompt_tokens": 778 + i, "answers": ["v07 v31", "<b>v09</b>"]}
        for stratum in strata for part, total in ({"development": 2} | {split: 4}).items() for i in range(total)
    ]  # fmt: skip
    units = [
        keys | unit_row(document["doc"], action, document["prompt_tokens"])
        for document in documents for action in (*actions, CONTROL)
    ]  # fmt: skip
    pairs = [pair(document["doc"], action) for document in documents for action in (*actions, CONTROL)]
    plan = {"baseline": actions[0], "replicates": 16, "documents": {"NIAH-4K": 8, "VT-4K": 8}, "alpha": 0.05,
            "primary": [{"quantity": "late_minus_early", "action": action} for action in actions],
            "target_half_width": 0.02, "plan_section_sha256": "ee" * 32, "expected_seconds": 7260.0,
            "cost_curve": [{"replicates": k, "documents_per_stratum": 192 // k, "widest_half_width": 0.1 / k,
                            "seconds": 3600.0 * (1 + k / 16), "reachable": k > 4} for k in (4, 16, 64)],
            "primary_endpoints": [{"quantity": "late_minus_early", "action": action, "development_value": 0.07,
                                   "expected_half_width": 0.015, "variance_between_documents": 0.0025,
                                   "variance_between_replicates": 0.01} for action in actions],
            "variance": {"between": 0.0123456, "within": 0.04}, "margin": -0.02, "note": None}  # fmt: skip
    views = {
        "studies": [keys | {"horizon": H, "seed": 7, "cohort_bound": BOUND, "early_last": EARLY, "late_first": LATE,
                            "first_block_last": 16, "second_block_last": 32, "agreement_run": 16,
                            "saturation_threshold": 0.99, "study_sha256": "cd" * 32}],
        "documents": documents,
        "actions": [
            {"study": STUDY, "action": action, "selector": action.split("-", 1)[0], "keep": keep_rule(action),
             "control": action == CONTROL, "prespecified": action != "recent-10"}
            for action in (*actions, CONTROL)
        ],
        "units": units,
        "plans": [keys | {"plan_sha256": "ab" * 32, "frozen_at": dt.datetime(2026, 3, 1, 9, 30, tzinfo=dt.UTC),
                         "events_version": 3, "plan": json.dumps(plan)}] if planned else [],
        "trajectories": [row for row, _ in pairs],
        "events": [event for _, events in pairs for event in events],
        "estimates": estimates if analyzed else [],
        "published": [], "calibration": calibration_rows(actions) if analyzed else [], "swrb": [], "swrb_windows": [],
    }  # fmt: skip
    fields = ("study", "model", *Windows.__dataclass_fields__)
    views["windows"] = [{name: row[name] for name in fields} for row in views["studies"]]
    return FakeViews(views | point_views(estimates, split) | depth_views(actions, split))


def depth_views(actions: tuple[str, ...], split: str) -> dict[str, list[Row]]:
    """Windows of every depth of a study that diverges everywhere at once: B_L shrinks to 0 along a straight line."""
    risk = {action: action_numbers(action, 0.0)["mismatch"] for action in actions}
    keys = {"study": STUDY, "model": MODEL, "split": split, "stratum": "pooled", "documents": 12}
    intervals, orderings = [], []
    for depth in range(1, H + 1):
        ends = {action: (value * depth / H, value + (1 - value) * (1 - depth / H)) for action, value in risk.items()}
        for action, (low, high) in ends.items():
            intervals.append(keys | {
                "action": action, "depth": depth, "observed": low, "capacity": high - low, "lower": low, "upper": high,
                "midpoint": (low + high) / 2, "half_width": (high - low) / 2, "realized_tail": risk[action] - low,
                "enclosure_low": max(0.0, low - 0.1), "enclosure_high": min(1.0, high + 0.1), "level": 0.95,
            })  # fmt: skip
            for other in actions:
                if other != action:
                    least, most = low - ends[other][1], high - ends[other][0]
                    orderings.append(keys | {"action": action, "baseline": other, "depth": depth, "contrast_low": least,
                                             "contrast_high": most, "ordered": least > 0 or most < 0})  # fmt: skip
    return {"identified_interval": intervals, "action_ordering": orderings}


def calibration_rows(actions: tuple[str, ...]) -> list[Row]:
    """Ridge is selected and equivalent, flat is different, the mean unresolved."""
    candidates = {"stratum_action_mean": (0.01, None), "flat": (0.13, "different"), "ridge": (-0.004, "equivalent")}
    return [
        {"study": STUDY, "model": MODEL, "action": action, "baseline": baseline, "observation": observation,
         "candidate": candidate, "selected": candidate == "ridge", "cross_validated_mse": 0.0025, "documents": 12,
         "gap": 0.2, "predicted_gap": 0.2 - error, "error": error, "low": error - 0.012, "high": error + 0.012,
         "level": 0.9875, "margin": 0.02, "decision": decision or "unresolved", "mae": 0.04, "rmse": 0.05,
         "draws": 10_000, "status": "exploratory", "events_version": 7, "plan_sha256": "ab" * 32}
        for baseline in actions for action in actions if action != baseline
        for observation in ("fixed_history", "positions") for candidate, (error, decision) in candidates.items()
    ]  # fmt: skip


def keep_rule(action: str) -> str:
    if action == CONTROL:
        return "all"
    return "1/10" if action.endswith("10") else "1/2"


def unit_row(doc: str, action: str, n: int) -> Row:
    kept = {"all": n, "1/10": n // 10, "1/2": n // 2}[keep_rule(action)]
    return {
        "doc": doc, "action": action, "first_replicate": 0, "replicates": 2 if action == CONTROL else 16, "horizon": H,
        "prompt_entries": n, "kept_entries": kept, "payload_bytes": kept * 1536, "index_bytes": kept * 24,
        "metadata_bytes": 96, "resident_bytes": kept * 1560 + 96, "prefill_seconds": 0.2, "decode_seconds": 1.4,
        "kernel_evaluations": 16 * H * 2, "device": "cpu", "dtype": "float32",
        "versions": json.dumps({"torch": "2.13.0", "transformers": "5.23.0"}), "seed": 7, "estimator": "plain",
    }  # fmt: skip


def pair(doc: str, action: str) -> tuple[Row, list[Row]]:
    """Replicate 0: diverges at 5 and after, X ends at 41 and Y at 37; the control never diverges."""
    keys = {"study": STUDY, "model": MODEL, "doc": doc, "action": action, "replicate": 0}
    tau = None if action == CONTROL else 5
    events = []
    for t in range(1, H + 1):
        x = 2 if t >= 41 else 8 + (7 * t + len(doc)) % 110
        apart = tau is not None and t >= tau and t % 6 != 0
        y = x if not apart else 8 + (11 * t + 1) % 110
        y = 2 if t >= 37 and tau else y
        events.append(keys | {"t": t, "x_token": x, "y_token": y})
    mismatches = sum(event["x_token"] != event["y_token"] for event in events)
    trajectory = keys | {
        "tau": tau, "eos_x": 41, "eos_y": 37 if tau else 41, "horizon": H, "mismatches": mismatches,
        "sum_delta": 0.9 * mismatches, "sum_f": 0.2 * mismatches,
    }  # fmt: skip
    return trajectory, events


def point_views(estimates: list[Row], split: str) -> dict[str, list[Row]]:
    """The point views that hold the same numbers, by the page's own map from columns to quantities."""
    made: dict[str, list[Row]] = {}
    for view in POINT_VIEWS:
        rows: dict[Any, Row] = {}
        columns = {quantity: column for column, quantity in view.columns.items()}
        for row in estimates:
            if row["quantity"] not in columns:
                continue
            key = (row["stratum"], row["action"], row["baseline"], row["x"])
            line = rows.setdefault(key, {"study": STUDY, "model": MODEL, "split": split, "stratum": row["stratum"],
                                         "action": row["action"], "baseline": row["baseline"], "documents": 12,
                                         "paths": 321})  # fmt: skip
            line[columns[row["quantity"]]] = row["estimate"]
            if view.x:
                line[view.x] = row["x"]
        made[view.view] = list(rows.values())
    return made


WORDS = {2: "<eos>", 8: " the", 9: "\n", 10: "", 11: "a b"}


def token_text(token: int) -> str:
    return WORDS.get(token, f"v{token:02d}")


def build(folder: Path, views: FakeViews, **options: Any) -> str:
    provenance = Provenance("stores/quickstart", {"events": 7, "results": 2}, {"duckdb": "2.0.0"})
    given = {"token_text": token_text, "provenance": provenance} | options
    page = build_report(views, STUDY, MODEL, folder, **given)
    return page.read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Holds opening against closing tags and collects ids, links and tables' cells."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.table: list[list[str]] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"twice the same attribute in {tag}"
        self.ids += [value for value in (found.get("id"),) if value]
        self.links += [value for name in ("href", "src") for value in (found.get(name),) if value]
        if tag == "table":
            self.table = self.tables.setdefault(found.get("id") or "", [])
        if tag == "tr" and self.table is not None:
            self.table.append([])
        if tag in {"td", "th"} and self.table:
            self.table[-1].append("")
        if tag == "small" and self.table:
            self.table[-1][-1] += " "
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag
        self.open.pop()
        if tag == "table":
            self.table = None

    def handle_data(self, data: str) -> None:
        if self.table and self.table[-1] and {"td", "th"} & set(self.open):
            self.table[-1][-1] += data


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    return checker


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").replace("†", "").replace("‡", "").rstrip("%"))


def ends(text: str) -> tuple[float, float]:
    low, high = re.fullmatch(r"\[(\S+), (\S+)\]", text).groups()  # type: ignore[union-attr]
    return number(low), number(high)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and tables: figures are made but not written."""
    monkeypatch.setattr("report.page.save", lambda _figure, _name, _folder, _text: "<svg></svg>")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("three")
    return folder, build(folder, make_views(("snapkv-half", "recent-half", "snapkv-10")))


def test_files_exist_and_parse(three: tuple[Path, str]) -> None:
    folder, html = three
    checker = check(html)
    for name in ("entry_cdf", "gap_terms", "gap_terms_by_stratum", "two_clocks", "clocks_by_stratum", "eos_terms", "depth",
                 "eos_terms_by_stratum", "calibration", "cost_curve"):  # fmt: skip
        assert ET.parse(folder / "figures" / f"{name}.svg").getroot().tag.endswith("svg")  # noqa: S314
        assert (folder / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert f"figure-{name}" in checker.ids
    for table in checker.tables:
        if table:
            assert (folder / "tables" / f"{table.removeprefix('table-')}.csv").stat().st_size > 0
    for link in checker.links:
        target = link.removeprefix("#")
        assert target in checker.ids if link.startswith("#") else (folder / link).is_file(), link


def test_page_is_self_contained(three: tuple[Path, str]) -> None:
    _, html = three
    assert not re.search(r"https?:|//[a-z]|<script|<img|@import|url\((?!#)", html)
    assert len(html) < 1_500_000


def test_same_input_gives_same_bytes(three: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = three
    build(tmp_path, make_views(("snapkv-half", "recent-half", "snapkv-10")))
    first = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    second = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert first == second


@pytest.mark.parametrize("table", ["decomposition", "gap", "eos_contrasts", "saturation"])
def test_printed_numbers_are_the_estimates(three: tuple[Path, str], table: str) -> None:
    folder, html = three
    rows = check(html).tables[f"table-{table}"]
    with (folder / "tables" / f"{table}.csv").open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    stored = {
        (row["action"], row["quantity"], row["baseline"]): row
        for row in make_views(("snapkv-half", "recent-half", "snapkv-10")).views["estimates"]
        if row["stratum"] == "pooled" and row["x"] is None
    }
    cells = [cell for row in rows[1:] for cell in row[1:]]
    assert len(cells) == len(records) > 0
    for cell, record in zip(cells, records, strict=True):
        row = stored[record["action"], record["quantity"], record["baseline"] or None]
        assert float(record["estimate"]) == row["estimate"]
        factor = QUANTITIES[record["quantity"]].unit.factor
        shown, bounds = cell.split(" ", 1)
        assert number(shown) == pytest.approx(factor * row["estimate"], abs=0.0501)
        assert ends(bounds) == pytest.approx((factor * row["low"], factor * row["high"]), abs=0.0501)
        assert ("†" in shown) == (row["family"] is not None)


def test_headline_says_what_the_numbers_say(three: tuple[Path, str]) -> None:
    _, html = three
    a, b = (action_numbers(action, 0.0) for action in ("snapkv-half", "recent-half"))
    share = contrast_numbers(b, a)["exposure_share"]
    assert "recent-half diverges earlier and stays apart longer than snapkv-half at the same bytes" in html
    assert f"disagrees with the full cache on {100 * b['mismatch']:.1f}% [" in html
    assert f"{100 * share:.0f}% of the gap is exposure" in html
    assert "full: δ and f exactly 0 in 18 pairs on 18 documents" in html
    assert "stays apart longer than snapkv-half with 0.20 times its prompt-cache bytes" in html


@pytest.mark.usefixtures("undrawn")
def test_overlapping_intervals_claim_nothing(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    for row in views.views["estimates"]:
        if row["quantity"] in {"gap", "exposure_term"}:
            row["low"], row["high"] = -0.5, 0.5
    html = build(tmp_path, views)
    assert "recent-half and snapkv-half are not told apart at the same bytes" in html
    assert "stays apart longer" not in html


@pytest.mark.usefixtures("undrawn")
def test_missing_intervals_are_said(tmp_path: Path) -> None:
    html = build(tmp_path, make_views(("snapkv-half", "recent-half"), analyzed=False, planned=False))
    table = check(html).tables["table-decomposition"]
    assert "Intervals are missing" in html
    assert "No plan was frozen" in html
    assert "recent-half disagrees with the full cache on 67.5% of positions, snapkv-half on 34.4% at the same" in html
    assert "longer than" not in html
    assert not any("[" in cell for row in table for cell in row)
    expected = 100 * action_numbers("snapkv-half", 0.0)["mismatch"]
    assert number(table[1][1]) == pytest.approx(expected, abs=0.051)


def test_empty_windows_leave_gaps_not_errors(tmp_path: Path) -> None:
    """A horizon too short for lag windows and for the first block: their quantities are null."""
    views = make_views(("snapkv-half", "recent-half"), strata=("NIAH-4K",))
    views.views["studies"][0] |= {"early_last": 0, "late_first": 33, "first_block_last": 0, "second_block_last": 0}
    for row in views.views["estimates"]:
        if "early" in row["quantity"] or "late" in row["quantity"] or row["quantity"].startswith("generation_"):
            row["estimate"] = row["low"] = row["high"] = None
    tables = check(build(tmp_path, views)).tables
    assert tables["table-generation_gaps"][0] == ["action", "g, –pp", "g, –pp", "g, 1–64pp", "Δgpp"]


@pytest.mark.usefixtures("undrawn")
def test_standing_of_estimates_is_said(tmp_path: Path) -> None:
    actions = ("snapkv-half", "recent-half", "recent-10")
    html = build(tmp_path, make_views(actions))
    tables = check(html).tables
    marked = {row[0]: row[1].split(" ")[0][-1] for row in tables["table-saturation"][1:]}
    assert marked == {"snapkv-half": "†", "recent-half": "†", "recent-10": "‡"}
    assert [row[0] for row in tables["table-primary"]].count("saturation positions with saturated δ") == 2
    assert "Actions that came after the plan: recent-10." in html
    without = build(tmp_path, make_views(actions, planned=False))
    assert "†" not in without
    assert "table-primary" not in check(without).ids
    assert "Exploratory, pointwise 95% intervals." in without


@pytest.mark.usefixtures("undrawn")
def test_stale_estimates_are_said(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    for row in views.views["decomposition"]:
        if row["action"] == "recent-half":
            row["mismatch"] += 0.01
    assert "after the last analysis of recent-half:" in build(tmp_path, views)


@pytest.mark.usefixtures("undrawn")
def test_one_action_alone(tmp_path: Path) -> None:
    html = build(tmp_path, make_views(("snapkv-half",), strata=("NIAH-4K",)))
    checker = check(html)
    assert "snapkv-half disagrees with its full-cache self on" in html
    assert "table-gap" not in checker.ids
    assert not {"figure-gap_terms", "figure-eos_terms", "gap", "calibration"} & set(checker.ids)


@pytest.mark.usefixtures("undrawn")
def test_six_actions_seven_strata(tmp_path: Path) -> None:
    strata = tuple(f"RULER-{length}K" for length in (4, 8, 16, 32, 64, 128, 256))
    html = build(tmp_path, make_views(tuple(HAZARD), strata=strata), baseline="knorm-half")
    assert "Contrasts are to <b>knorm-half</b> (as asked for)" in html
    assert html.index("RULER-8K") < html.index("RULER-16K")
    styles = action_styles(list(HAZARD))
    assert len({style.colour for style in styles.values()}) == len({str(s.dashes) for s in styles.values()}) == 6


@pytest.mark.usefixtures("undrawn")
def test_nulls_are_dashes(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    for row in views.views["estimates"]:
        if row["quantity"] in {"early", "late", "late_minus_early", "exposure_share", "branch_delta", "eos_share"}:
            row["estimate"] = row["low"] = row["high"] = None
    tables = check(build(tmp_path, views)).tables
    branch = dict(zip(tables["table-branch"][0], tables["table-branch"][1], strict=True))
    assert [branch[head] for head in ("early δ%", "late δ%", "late − earlypp")] == [MISSING] * 3
    assert tables["table-eos_contrasts"][1][-1] == MISSING


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    odd = "<b>&half$x$</b>"
    views = make_views(("_plain", odd), strata=('<i>S</i> q"1',))
    html = build(tmp_path, views, token_text=lambda token: f"<i>&{token}")
    checker = check(html)
    assert odd not in html
    assert "&lt;b&gt;&amp;half$x$&lt;/b&gt;" in html
    assert "<b>v09</b>" not in html
    assert "<b>&lt;i&gt;&amp;" in html
    assert checker.tables["table-decomposition"][2][0] == odd
    svg = (tmp_path / "figures" / "entry_cdf.svg").read_text(encoding="utf-8")
    assert "_plain" in svg
    assert "&lt;b&gt;&amp;half$x$&lt;/b&gt;" in svg


def test_examples_mark_what_happens(three: tuple[Path, str]) -> None:
    _, html = three
    part = html[html.index('id="examples"') : html.index('id="definitions"')]
    assert part.count('<div class="pair">') == 9  # three strata, three actions
    assert "first mismatch at τ = 5" in part
    assert "reference ends at 41, compressed ends at 37" in part
    first = part[part.index('<div class="pair">') :]
    side = r'<{0}(?: class="([sz])")?>([^<]*)</{0}>'
    cell = r'<span class="(|[me]| e|m e)"><u>([^<]*)</u>' + side.format("b") + side.format("i")
    cells = re.findall(cell, first[: first.index("</div>")])
    assert len(cells) == 41
    assert [place for place, cell in enumerate(cells, 1) if cell[1] == "τ"] == [5]
    _, events = pair("NIAH-4K/evaluation/0", "snapkv-half")
    marked = [place for place, cell in enumerate(cells, 1) if "m" in cell[0].split()]
    assert marked == [event["t"] for event in events if event["x_token"] != event["y_token"]]
    assert [cell[2] for cell in cells] == [""] * 40 + ["s"]
    assert [cell[4] for cell in cells] == [""] * 36 + ["s"] + ["z"] * 4


@pytest.mark.usefixtures("undrawn")
def test_control_that_moved_is_a_notice(tmp_path: Path) -> None:
    views = make_views(("snapkv-half",))
    assert "The control full keeps the whole cache" not in build(tmp_path, views)
    next(row for row in views.views["trajectories"] if row["action"] == CONTROL)["sum_f"] = 1e-7
    html = build(tmp_path, views)
    assert "The control full keeps the whole cache" in html
    assert "full: δ and f NOT 0" in html


@pytest.mark.usefixtures("undrawn")
def test_unknown_quantities_are_not_hidden(tmp_path: Path) -> None:
    views = make_views(("snapkv-half",))
    views.views["estimates"] += estimate_rows("pooled", "snapkv-half", None, {"new_quantity": 0.123})
    rows = check(build(tmp_path, views)).tables["table-other"]
    assert rows[1][0].strip() == "new_quantity"
    assert rows[1][3].startswith("12.3 %")


@pytest.mark.usefixtures("undrawn")
def test_development_only_study_says_so(tmp_path: Path) -> None:
    html = build(tmp_path, make_views(("snapkv-half",), split="development", analyzed=False))
    assert "the page shows the development documents" in html


@pytest.mark.usefixtures("undrawn")
def test_documents_without_events_are_counted_apart(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    views.views["documents"] += [
        row | {"doc": f"{row['doc']}x", "split": "evaluation"} for row in views.views["documents"][:5]
    ]
    html = build(tmp_path, views)
    assert "12 evaluation, 6 development, 3 strata; 5 more are listed but not measured" in html


@pytest.mark.usefixtures("undrawn")
def test_events_of_another_generator_have_a_page_too(tmp_path: Path) -> None:
    """Ingested events have no row in studies: seed and study file are not known, windows follow from the horizon."""
    views = make_views(("snapkv-half", "recent-half"), planned=False)
    views.views["studies"] = []
    html = build(tmp_path, views)
    assert "<dt>Seed</dt><dd>not recorded</dd>" in html
    assert "Study file SHA-256" not in html


@pytest.mark.usefixtures("undrawn")
def test_wrong_names_are_one_line_errors(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    with pytest.raises(InputError, match="half-cache / kvdrift/tiny"):
        build_report(views, "half-cach", MODEL, tmp_path)
    with pytest.raises(InputError, match="did you mean 'recent-half'"):
        build_report(views, STUDY, MODEL, tmp_path, baseline="recent-hal")
    whole = views.views["decomposition"]
    views.views["decomposition"] = []
    with pytest.raises(InputError, match="no derived trajectories yet"):
        build_report(views, STUDY, MODEL, tmp_path)
    views.views["decomposition"] = whole
    views.views["actions"] = [row for row in views.views["actions"] if row["control"]]
    with pytest.raises(InputError, match="nothing to report"):
        build_report(views, STUDY, MODEL, tmp_path)


def test_every_registered_quantity_has_a_label() -> None:
    stats = pytest.importorskip("stats.quantities")
    assert [name for name in stats.QUANTITIES if known_quantity(name) is None] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixed(-0.04, 1), "0.0"), (fixed(-1.26, 1), "−1.3"), (fixed(None, 1), MISSING), (fixed(12345.6, 0), "12,346"),
        (size(1536), "1.5 KiB"), (size(80), "80 B"), (duration(90), "90.0 s"), (duration(7200), "2.0 h"),
        (count_range([4, None, 9]), "4–9"), (count_range([]), MISSING), (visible("a\n"), "a↵"), (visible(""), "∅"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.usefixtures("undrawn")
def test_plan_section_has_spreads_and_what_precision_costs(tmp_path: Path) -> None:
    html = build(tmp_path, make_views(("snapkv-half", "recent-half")))
    tables = check(html).tables
    endpoint = tables["table-plan_endpoints"][1]
    assert endpoint[2:] == ["7.00 pp", "5.00 pp", "10.00 pp", "1.50 pp"]  # roots of the components, in points
    assert [row[:2] for row in tables["table-cost_curve"][1:]] == [["4", "48"], ["16", "12"], ["64", "3"]]
    assert "<dt>expected time</dt><dd>2.0 h</dd>" in html
    assert html.index("plan section sha256") > html.index("Everything else in the plan") > html.index("<dt>alpha</dt>")


@pytest.mark.usefixtures("undrawn")
def test_windows_say_from_where_actions_are_ordered(tmp_path: Path) -> None:
    tables = check(build(tmp_path, make_views(("snapkv-half", "recent-half")))).tables
    low, high = (action_numbers(action, 0.0)["mismatch"] for action in ("snapkv-half", "recent-half"))
    first = next(depth for depth in range(1, H + 1)
                 if high * depth / H > low + (1 - low) * (1 - depth / H))  # fmt: skip
    assert tables["table-action_ordering"][1][0] == "recent-half"
    assert tables["table-action_ordering"][1][-1] == f"L = {first}"
    depths = [row[0] for row in tables["table-identified_interval"][1:] if len(row) > 1]
    assert depths == ["1", "8", "16", "32", "64"] * 2


@pytest.mark.usefixtures("undrawn")
def test_calibration_shows_every_candidate_and_its_decision(tmp_path: Path) -> None:
    tables = check(build(tmp_path, make_views(("snapkv-half", "recent-half")))).tables
    heading, *rows = tables["table-calibration"][1:]
    assert heading == ["recent-half − snapkv-half: ΔR = 20.00 pp"]
    assert [row[0] for row in rows] == ["fixed history"] * 3 + ["positions 1–16"] * 3
    assert [(row[1], row[5]) for row in rows[:3]] == [
        ("cell mean", "unresolved"), ("flat, uncalibrated", "different"), ("ridge selected", "equivalent"),
    ]  # fmt: skip
    assert rows[2][4] == "−0.40 [−1.60, 0.80]"
    assert len(tables["table-uncalibrated"]) == 6


@pytest.mark.usefixtures("undrawn")
def test_sections_without_rows_say_so_in_a_line(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    gone = {"identified_interval", "action_ordering", "calibration", "entry", "eos_partition"}
    views.views |= {view: [] for view in gone}
    views.views["estimates"] = [
        row for row in views.views["estimates"] if row["quantity"] not in {"entry_cdf", "eos_gap", "survival", "hazard"}
    ]
    html = build(tmp_path, views)
    checker = check(html)
    assert not {"figure-depth", "figure-calibration", "figure-entry_cdf", "table-eos_partition"} & set(checker.ids)
    for what in ("identified intervals", "entry times", "EOS partition"):
        assert f"Not shown: the views have no {what} for this study yet." in html
    assert "No predictor has been judged" in html


LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def paper_row(quantity: str, value: float, **more: Any) -> Row:
    row = {"study": "first", "model": "Llama-3.1-8B-Instruct", "stratum": "pooled", "action": "recent-half",
           "baseline": "snapkv-half", "quantity": quantity, "x": None, "unit": "pp", "value": value, "low": None,
           "high": None, "level": None, "source": "text"}  # fmt: skip
    return row | more


PAPER = [
    paper_row("token_mismatch_gap", 20.7),
    paper_row("token_mismatch_gap_figure", 20.79, low=19.06, high=22.51, level=0.95),
    paper_row("exposure_share", 84.7, unit="%"),
    paper_row("generation_clock_tv_gap", 37.19, x="1-32"),
    paper_row("divergence_cdf", 61.05, x="32", action="snapkv-half", baseline=None, unit="%"),
    paper_row("mean_entry_given_divergence", 30.37, action="snapkv-half", baseline=None, unit="steps"),
    paper_row("late_minus_early_branch_tv", 4.21, stratum="VT-4K", action="snapkv-half", baseline=None),
    paper_row("branch_cohort_documents", 288.0, action="snapkv-half", baseline=None, unit="count"),
    paper_row("branch_cohort_paths", 4723.0, action="snapkv-half", baseline=None, unit="count"),
    paper_row("calibration_error:positions_1_32:ridge:equivalent", -0.388, low=-1.062, high=0.301, level=0.9875),
    paper_row("calibration_mae:positions_1_32", 4.09),
    paper_row("exposure_share", 11.1, unit="%", action="snapkv-512"),
    paper_row("exposure_share", 22.2, unit="%", model="Qwen2.5-7B-Instruct"),
    paper_row("exposure_share_max", 96.1, unit="%", model=None, stratum="stratum-range", action=None, baseline=None),
]


def as_paper(views: FakeViews, *, horizon: int = 128) -> FakeViews:
    """The study as if it were of the paper's model and horizon, beside the paper's numbers."""
    for rows in views.views.values():
        for row in rows:
            if "model" in row:
                row["model"] = LLAMA
    views.views["published"] = PAPER
    views.views["studies"][0] |= {"horizon": horizon, "first_block_last": 32, "second_block_last": 64}
    return views


def build_paper(folder: Path, **options: Any) -> str:
    views = as_paper(make_views(("snapkv-half", "recent-half"), strata=("VT-4K",)), **options)
    return build_report(views, STUDY, LLAMA, folder).read_text(encoding="utf-8")


def test_published_numbers_stand_beside_ours(tmp_path: Path) -> None:
    html = build_paper(tmp_path)
    tables = check(html).tables
    gap = dict(zip(tables["table-gap"][0], tables["table-gap"][1], strict=True))
    assert gap["ΔRpp"].endswith("published 20.8")
    assert gap["exposure share%"].endswith("published 84.7")
    assert "published" not in gap["rate share%"]
    assert tables["table-generation_gaps"][1][1].endswith("published 37.2")
    assert re.search(r"published 61\.[01]$", tables["table-entry"][1][1])
    assert tables["table-entry"][1][-1].endswith("published 30.4")
    assert "published 288 / 4,723" in tables["table-branch"][1][2]
    with (tmp_path / "tables" / "branch_by_stratum.csv").open(encoding="utf-8") as file:
        found = {(row["action"], row["quantity"]): row["published"] for row in csv.DictReader(file)}
    assert float(found["snapkv-half", "late_minus_early"]) == pytest.approx(0.0421)
    assert not found["recent-half", "late_minus_early"]
    ridge = tables["table-calibration"][7]
    assert ridge[4].endswith("published −0.39")
    assert ridge[5].endswith("published equivalent")
    assert ridge[6].endswith("published 4.09")
    assert "11.1" not in html
    assert "22.2<" not in html
    for figure in ("entry_cdf", "gap_terms", "two_clocks", "calibration"):
        assert "open: published" in (tmp_path / "figures" / f"{figure}.svg").read_text(encoding="utf-8")
    with (tmp_path / "tables" / "gap.csv").open(encoding="utf-8") as file:
        row = next(row for row in csv.DictReader(file) if row["quantity"] == "gap")
    assert [float(row[f"published{end}"]) for end in ("", "_low", "_high")] == pytest.approx([0.2079, 0.1906, 0.2251])


@pytest.mark.usefixtures("undrawn")
def test_published_numbers_of_another_horizon_are_not_compared(tmp_path: Path) -> None:
    html = build_paper(tmp_path, horizon=64)
    assert "but at a horizon of 128 tokens" in html
    assert "published 2" not in html


@pytest.mark.usefixtures("undrawn")
def test_studies_unlike_the_paper_show_nothing_published(tmp_path: Path) -> None:
    views = make_views(("snapkv-half", "recent-half"))
    views.views["published"] = PAPER
    assert "published" not in re.sub(r"<style>.*?</style>", "", build(tmp_path, views), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("model", "same"),
    [(LLAMA, True), ("/models/llama-3.1-8b-instruct/", True), ("Llama-3.1-8B-Instruct", True),
     ("x/not-Llama-3.1-8B-Instruct", False), ("meta-llama/Llama-3.1-8B", False)],
)  # fmt: skip
def test_models_match_by_the_end_of_their_id(model: str, same: bool) -> None:  # noqa: FBT001
    assert is_model(model, "Llama-3.1-8B-Instruct") is same
    assert not is_model(model, None)


@pytest.mark.usefixtures("undrawn")
def test_latex_is_whole_and_escaped(tmp_path: Path) -> None:
    odd = r"a_b & 50% #1 ~^\{x}$"
    html = build(tmp_path, make_views(("snapkv-half", odd, "recent-half")), latex=True)
    tables = check(html).tables
    assert {path.stem for path in (tmp_path / "tables").glob("*.tex")} == {
        path.stem for path in (tmp_path / "tables").glob("*.csv")
    } - {"estimates"}
    for path in (tmp_path / "tables").glob("*.tex"):
        check_latex(path.read_text(encoding="utf-8"))
    text = (tmp_path / "tables" / "gap.tex").read_text(encoding="utf-8")
    assert escape(odd) in text
    assert r"$\Delta$R" in text
    assert " & pp & " in text
    low, high = ends(tables["table-gap"][1][1].split(" ", 1)[1])
    assert f"[{low}, {high}]" in text


def check_latex(text: str) -> None:
    """Environments, braces and math are balanced, every line of cells has as many as columns, all of it is ASCII."""
    assert text.isascii(), [sign for sign in text if not sign.isascii()]
    body = re.sub(r"^%.*\n", "", text)
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    bare = re.sub(r"\\[\\{}$&%#_]", "", body)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert "%" not in bare
    assert "#" not in bare
    outside = re.sub(r"\$[^$]*\$", "", bare)
    assert "_" not in re.sub(r"\\label\{[^}]*\}", "", outside)
    assert "^" not in outside
    columns = re.search(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}", body)
    assert columns is not None
    for line in body.splitlines():
        if line.endswith(r" \\") and "multicolumn" not in line:
            assert re.sub(r"\\&", "", line).count("&") == len(columns[1]) - 1, line
    assert re.findall(r"\\(\w+rule)", body) == ["toprule", "midrule", "bottomrule"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50% & a_b", r"50\% \& a\_b"), ("ΔE · C̄", r"$\Delta$E $\cdot$ $\bar{C}$"), ("τ≤T", r"$\tau\le$T"),
     ("$−1", r"\$$-$1"), ("G₁", "G$_1$"), ("\\{}", r"\textbackslash{}\{\}"), ("a–b", "a--b")],
)  # fmt: skip
def test_signs_become_latex(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_plan_of_any_shape_becomes_rows() -> None:
    rows = plan_rows({"a": {"b_c": [1, 2]}, "list": [{"x": 1}, {"y": True}], "empty": {}, "none": None})
    assert [(row.key, row.text) for row in rows] == [("a › b c", "1, 2"), ("list", ""), ("empty", "–"), ("none", "–")]
    assert rows[1].heads == ("x", "y")
    assert rows[1].lines == (("1", "–"), ("–", "yes"))
    chosen_first = plan_rows({"alpha": 0.05, "zeta": 1, "replicates": 16})
    assert [row.key for row in chosen_first] == ["replicates", "alpha", "zeta"]
