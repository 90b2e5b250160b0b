"""The page's section on residual branching: words that follow from the numbers, systems of known risk, the paper's."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_views import (
    MODEL,
    STUDY,
    FakeViews,
    Page,
    Row,
    build,
    check,
    check_latex,
    check_printed,
    estimate_rows,
    make_views,
    records,
    these_alone,
)

from kvdrift.report.printing.numbers import MISSING
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.branching import LOSES, OPEN, PAYS, verdict
from kvdrift.schema.windows import Windows
from kvdrift.stats.quantities import BRANCHING_QUANTITIES

ACTIONS = ("snapkv-half", "recent-half", "recent-10")
# Share of pairs that diverge, variance ratio, evaluations ratio, time ratio; intervals are +- 8% and 0.002.
GAINS = {
    "snapkv-half": (0.05, 40.0, 1.25, 2.0), "recent-half": (0.7, 1.7, 1.7, 2.5), "recent-10": (0.99, 1.02, 1.5, 2.0),
}  # fmt: skip


def branching_numbers(action: str) -> dict[str, float]:
    mass, variance, evaluations, seconds = GAINS[action]
    return {
        "swrb_mismatch": mass * 0.8, "plain_mismatch": mass * 0.8 + 0.003, "swrb_occurrence": mass / 64,
        "swrb_occupation": mass * 0.8 - mass / 64, "swrb_divergence_probability": mass, "plain_variance": 0.02,
        "swrb_variance": 0.02 / variance, "plain_evaluations": 60.0, "swrb_evaluations": 60.0 * evaluations,
        "plain_seconds": 0.08, "swrb_seconds": 0.08 * seconds, "variance_ratio": variance,
        "evaluation_ratio": evaluations, "second_ratio": seconds, "efficiency": variance / evaluations,
        "efficiency_in_seconds": variance / seconds,
    }  # fmt: skip


def branched_views(branched: tuple[str, ...] = ACTIONS, **options: Any) -> FakeViews:
    """The study of ``test_report`` with SWRB replicates of some of its actions."""
    views = make_views(ACTIONS, **options)
    keys = {"study": STUDY, "model": MODEL, "split": "evaluation"}
    rows: dict[str, list[Row]] = {"swrb_risk": [], "swrb_efficiency": [], "swrb_windows": []}
    for action in branched:
        numbers = branching_numbers(action)
        named: dict[str, Row] = {"swrb_risk": {}, "swrb_efficiency": {}}
        for name, quantity in BRANCHING_QUANTITIES.items():
            if quantity.view in named:
                named[quantity.view][quantity.column] = numbers[name]
        for stratum in ("pooled", "NIAH-4K", "NIAH-16K", "VT-4K"):
            if options.get("analyzed", True):
                views.views["estimates"] += estimate_rows(stratum, action, None, numbers)
            where = keys | {"stratum": stratum, "action": action, "documents": 12}
            rows["swrb_risk"].append(where | named["swrb_risk"] | {"replicates": 192, "monte_carlo_error": 0.0012})
            of_one = {"doc": f"{stratum}/evaluation/0", "efficiency": 99.0}
            rows["swrb_efficiency"] += [where | named["swrb_efficiency"] | more for more in ({"doc": None}, of_one)]
        own = [row for row in views.views["identified_interval"] if row["action"] == action]
        rows["swrb_windows"] += [row | {"lower": row["lower"] * 0.99} for row in own]
    views.views |= rows
    units = [row for row in views.views["units"] if row["action"] in branched]
    views.views["units"] += [row | {"estimator": "swrb", "replicates": 5} for row in units]
    return views


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("branched")
    draw = these_alone("swrb_efficiency")
    return folder, build(folder, branched_views(), latex=True, draw=draw)


def test_the_table_says_where_it_pays_and_where_not(drawn: tuple[Path, str]) -> None:
    rows = check(drawn[1]).tables["table-swrb_efficiency"]
    assert [(row[0], row[-1]) for row in rows[1:]] == [("snapkv-half", PAYS), ("recent-10", LOSES), ("recent-half", OPEN)]  # fmt: skip


@pytest.mark.parametrize("table", ["swrb_efficiency", "swrb_costs"])
def test_printed_numbers_are_the_estimates(drawn: tuple[Path, str], table: str) -> None:
    folder, html = drawn
    check_printed(check(html).tables[f"table-{table}"], records(folder, table))
    for record in records(folder, table):
        assert float(record["estimate"]) == branching_numbers(record["action"])[record["quantity"]]


def test_both_risks_stand_side_by_side_with_their_difference(drawn: tuple[Path, str]) -> None:
    folder, html = drawn
    head, *rows = check(html).tables["table-swrb_risk"]
    row = dict(zip(head, rows[0], strict=True))
    assert row["action"] == "snapkv-half"
    assert (row["documents"], row["replicates"]) == ("12", "192")
    assert row["R (SWRB)%"].startswith("4.0 [")
    assert row["R (coupled)%"].startswith("4.3 [")
    assert row["differencepp"] == "−0.30 ± 0.12"
    assert row["in std errors"] == "−2.5"
    assert float(records(folder, "swrb_risk")[0]["monte_carlo_error"]) == 0.0012


def test_its_files_are_there(drawn: tuple[Path, str]) -> None:
    folder, html = drawn
    for name in ("swrb_efficiency",):
        assert ET.parse(folder / "figures" / f"{name}.svg").getroot().tag.endswith("svg")  # noqa: S314
        pdf = (folder / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF")
        packed = re.findall(rb"stream\r?\n(\x78.*?)endstream", pdf, re.DOTALL)
        streams = [zlib.decompressobj().decompress(text) for text in packed]
        fonts = [stream for stream in streams if stream.startswith(b"\0\1\0\0")]
        assert fonts
        assert not any(table in font[:400] for font in fonts for table in (b"GDEF", b"GPOS", b"GSUB", b"MATH"))
    assert "mathdefault" not in html  # ticks of logarithmic axes are plain numbers
    for name in ("swrb_risk", "swrb_efficiency", "swrb_efficiency_by_stratum", "swrb_costs", "swrb_windows"):
        check_latex((folder / "tables" / f"{name}.tex").read_text(encoding="utf-8"))
    windows = check(html).tables["table-swrb_windows"]
    assert [row[0] for row in windows[1:] if len(row) > 1] == ["1", "8", "16", "32", "64"] * 3


def test_replicates_of_both_estimators_are_counted_apart(drawn: tuple[Path, str]) -> None:
    head, *rows = check(drawn[1]).tables["table-actions"]
    assert {row[head.index("K")] for row in rows} == {"16 5 SWRB", "2"}


def test_a_study_without_branches_has_no_such_section(tmp_path: Path, page: Page) -> None:
    views = make_views(ACTIONS)
    views.views = {view: rows for view, rows in views.views.items() if not view.startswith("swrb")}  # or a KeyError
    html = page(views)
    assert "esidual branching" not in html
    assert not [path for path in (tmp_path / "tables").iterdir() if path.name.startswith("swrb")]


def test_actions_that_were_not_branched_are_left_out(page: Page) -> None:
    tables = check(page(branched_views(("recent-half",)))).tables
    assert [row[0] for row in tables["table-swrb_risk"][1:]] == ["recent-half"]
    assert [(row[0], row[-1]) for row in tables["table-swrb_efficiency"][1:]] == [("recent-half", OPEN)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.01, 9.0, PAYS), (0.2, 0.99, LOSES), (0.9, 1.1, OPEN), (1.0, 2.0, OPEN), (None, None, OPEN)],
)
def test_an_interval_beside_one_decides(low: float | None, high: float | None, expected: str) -> None:
    assert verdict(Estimate("pooled", "a", None, "efficiency", None, 1.5, low, high)) == expected


# ---------------------------------------------------------------------------------------------- systems of known risk

SYSTEMS = "binary-24"


def finite_views(*, horizon: int = 3, model: str = SYSTEMS) -> FakeViews:
    """One action on five systems: plain estimates off by one standard error, SWRB exact with a 20 c smaller variance."""
    views = branched_views(("snapkv-half",), strata=("binary",))
    keep = {"snapkv-half", "full"}
    for name, rows in views.views.items():
        views.views[name] = [row for row in rows if row.get("action", "full") in keep]
    for row in views.views["actions"]:
        row["selector"] = "finite-state"
    views.set_windows(Windows.of(horizon))
    views.views["estimates"] = [row for row in views.views["estimates"] if (row["x"] or 0) <= horizon]
    keys = {"study": STUDY, "model": MODEL, "split": "evaluation", "stratum": "binary", "action": "snapkv-half"}
    enumerated: list[Row] = []
    for c in range(1, 6):
        variance = 0.01 * c
        common = keys | {"doc": f"system-{c}", "replicates": 100, "exact_risk": 0.01 * c, "evaluations": 3.0}
        plain = common | {"estimator": "plain", "risk": 0.01 * c + (variance / 100) ** 0.5, "risk_variance": variance}
        swrb = common | {"estimator": "swrb", "risk": 0.01 * c, "risk_variance": variance / (20 * c)}
        views.views["swrb"] += [plain, swrb]
        exact = {"mismatch": 0.01 * c, "plain_variance": variance, "swrb_variance": variance / (22 * c),
                 "plain_evaluations": 3.0, "swrb_evaluations": 3.6}  # fmt: skip
        named = {name: keys[name] for name in ("study", "model", "action")} | {"doc": f"system-{c}", "x": None}
        enumerated += [named | {"quantity": name, "value": value} for name, value in exact.items()]
        views.views["swrb_efficiency"].append(keys | {"doc": f"system-{c}", "variance_ratio": 20.0 * c})
    views.views |= {"published": published_systems(), "exact_values": enumerated}
    for rows in views.views.values():
        for row in rows:
            if row.get("model") == MODEL:
                row["model"] = model
    return views


def published_systems() -> list[Row]:
    empty = {"study": "finite-state", "model": SYSTEMS, "stratum": None, "action": None, "baseline": None, "x": None}
    totals = {"variance_ratio_min": 11.1, "variance_ratio_median": 52.7, "variance_ratio_max": 289.0,
              "kernel_pair_evaluations_ratio": 1.37, "variance_cost_advantage": 20.0}  # fmt: skip
    rows = [empty | {"quantity": name, "value": value, "unit": "ratio"} for name, value in totals.items()]
    for c, ratio in ((1, 11.1), (2, 52.7), (10, 289.3)):
        for name, value in (("exact_risk", 0.02), ("naive_estimate", 0.03), ("swrb_estimate", 0.021)):
            rows.append(empty | {"stratum": f"system-{c}", "quantity": name, "value": value, "x": str(c)})
        rows.append(empty | {"quantity": "variance_ratio_sorted", "value": ratio, "x": str(c)})
    return rows


@pytest.fixture(scope="module")
def finite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("finite")
    return folder, build(folder, finite_views(), SYSTEMS, latex=True, draw=these_alone("swrb_systems"))


def test_systems_stand_beside_the_papers(finite: tuple[Path, str]) -> None:
    folder, html = finite
    tables = check(html).tables
    summary = {row[0]: row[1:] for row in tables["table-swrb_validation"]}
    assert summary == {
        "of all systems": ["this study", "exact", "published"],
        "systems with a smaller variance by SWRB": ["5 of 5", "5 of 5", "3 of 3"],
        "variance ratio, least": ["20.0", "22.0", "11.1"],
        "variance ratio, median": ["60.0", "66.0", "52.7"],
        "variance ratio, greatest": ["100", "110", "289"],
        "evaluations ratio": ["1.25 [1.15, 1.35]", "1.20", "1.37"],
        # (1 + 2 + 3 + 4 + 5) / (5 / 22) / 1.2: ratios of means, not the mean of ratios
        "efficiency: variance for evaluations, ratio of means": ["32.0 [29, 35]", "55.0", "20.0"],
    }
    systems = [row for row in tables["table-swrb_systems"][1:] if len(row) > 1]
    assert [row[0] for row in systems] == [*(f"system-{c} · snapkv-half" for c in range(1, 6)), "system-1", "system-2",
                                           "system-10"]  # fmt: skip
    assert systems[3][1:] == ["4.00", "6.00 1.0 std errors", "4.00 0.0 std errors", "80.0 exactly 88.0"]
    assert systems[5][1:] == ["2.00", "3.00", "2.10", MISSING]
    svg = (folder / "figures" / "swrb_systems.svg").read_text(encoding="utf-8")
    for text in ("open: published", "median 60.0×", "published median 52.7×", "dashed: no error (a), median (b)"):
        assert text in svg
    assert (folder / "figures" / "swrb_systems.pdf").read_bytes().startswith(b"%PDF")
    lines = records(folder, "swrb_systems")
    assert [row["source"] for row in lines] == ["this study"] * 5 + ["published"] * 3
    assert float(lines[4]["plain_variance"]) == 0.05
    for name in ("swrb_validation", "swrb_systems"):
        check_latex((folder / "tables" / f"{name}.tex").read_text(encoding="utf-8"))


def test_nothing_on_the_page_speaks_of_prompts_or_caches(finite: tuple[Path, str]) -> None:
    _, html = finite
    checker = check(html)
    assert not {"eos", "saturation", "clocks", "examples"} & set(checker.ids)
    assert [link for link in checker.links if link.startswith("#") and link[1:] not in checker.ids] == []
    text = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", html, flags=re.DOTALL)
    for word in ("prompt length", "prefilled", "full cache", "full-cache", "evict", "compressed model’s,"):
        assert word not in text, word
    assert checker.tables["table-actions"][0] == ["action", "K", "time to measure"]
    assert checker.tables["table-documents"][0] == ["stratum", "development", "evaluation"]


@pytest.mark.parametrize(("horizon", "model"), [(4, SYSTEMS), (3, "ternary")])
def test_systems_of_another_kind_stand_alone(page: Page, horizon: int, model: str) -> None:
    html = page(finite_views(horizon=horizon, model=model), model)
    tables = check(html).tables
    assert tables["table-swrb_validation"][0] == ["of all systems", "this study", "exact"]
    assert [row[0] for row in tables["table-swrb_systems"][1:]] == [f"system-{c} · snapkv-half" for c in range(1, 6)]
    assert "paper’s systems" not in html


def test_ratios_over_a_variance_of_zero_are_left_out_and_said(page: Page) -> None:
    views = finite_views()
    for row in views.views["swrb"]:
        if row["doc"] == "system-2" and row["estimator"] == "swrb":
            row["risk_variance"] = 0.0
    for row in views.views["swrb_efficiency"]:
        if row["doc"] == "system-2":
            row["variance_ratio"] = None
    rows = check(page(views, SYSTEMS)).tables["table-swrb_validation"]
    assert rows[1][:2] == ["systems with a smaller variance by SWRB", "5 of 5"]
    assert rows[3][:2] == ["variance ratio, median of the 4 systems whose SWRB variance is not 0", "70.0"]


def test_systems_without_branches_have_their_estimates_alone(tmp_path: Path) -> None:
    views = finite_views(model="ternary")
    for name in ("swrb_risk", "swrb_efficiency", "swrb_windows"):
        views.views[name] = []
    for name in ("swrb", "units"):
        views.views[name] = [row for row in views.views[name] if row["estimator"] == "plain"]
    html = build(tmp_path, views, "ternary")
    checker = check(html)
    assert "<h3>Systems of known risk</h3>" in html
    assert "esidual branching" not in html
    assert checker.tables["table-swrb_systems"][1] == ["system-1 · snapkv-half", "1.00", "2.00 1.0 std errors", MISSING,
                                                       "– exactly 22.0"]  # fmt: skip
    assert not {"table-swrb_validation", "table-swrb_windows"} & set(checker.ids)
    svg = (tmp_path / "figures" / "swrb_systems.svg").read_text(encoding="utf-8")
    assert "median" not in svg
    assert "SWRB" not in svg
