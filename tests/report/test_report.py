"""The page, its figures and tables, from a synthetic study whose curves are known in closed form.

Each action diverges with a constant hazard λ and disagrees at rate C while exposed, so that O, E, R and the entry CDF
follow from (λ, C, H); intervals are the point ± a fixed part of it.
"""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from fixtures.report_views import (
    HAZARD,
    MODEL,
    FakeViews,
    H,
    Page,
    Row,
    action_numbers,
    build,
    check,
    check_latex,
    check_printed,
    content_of,
    contrast_numbers,
    estimate_rows,
    make_scalar_views,
    make_views,
    number,
    pair,
    records,
    these_alone,
)

from kvdrift.flows.pages.reports import write_report
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.store import Store
from kvdrift.report.figures.canvas import action_styles, new_figure
from kvdrift.report.page import page_files
from kvdrift.report.printing.estimate_tables import estimate_cells, status_note
from kvdrift.report.printing.numbers import MISSING, count_range, duration, fixed, significant, size
from kvdrift.report.printing.tables import escape
from kvdrift.report.reading.content import is_model
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections import contrasts, plan
from kvdrift.report.sections.branching import window_panels
from kvdrift.report.sections.divergence import strata_figure
from kvdrift.report.sections.gap import GAP_TERMS, term_bars
from kvdrift.report.sections.plan import endpoints_table, plan_rows
from kvdrift.report.sections.study import documents_table, study_rows
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.tables import TABLES
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import view_texts
from kvdrift.sql.contracts import contract
from kvdrift.stats.registry import Scale

THREE = ("snapkv-half", "recent-half", "snapkv-10")
ONE = ("NIAH-4K",)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("three")
    return folder, build(folder, make_views(THREE), draw=these_alone())


@pytest.mark.slow
def test_files_exist_and_parse(tmp_path: Path) -> None:
    checker = check(build(tmp_path, make_views(THREE)))
    for name in ("entry_cdf", "gap_terms", "gap_terms_by_stratum", "two_clocks", "clocks_by_stratum", "eos_terms", "depth",
                 "eos_terms_by_stratum", "calibration"):  # fmt: skip
        assert ET.parse(tmp_path / "figures" / f"{name}.svg").getroot().tag.endswith("svg")  # noqa: S314
        assert (tmp_path / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert f"figure-{name}" in checker.ids
    for table in checker.tables:
        if table and table != "table-glance":  # its numbers are those of table-ranking
            assert (tmp_path / "tables" / f"{table.removeprefix('table-')}.csv").stat().st_size > 0
    for link in checker.links:
        target = link.removeprefix("#")
        assert target in checker.ids if link.startswith("#") else (tmp_path / link.partition("#")[0]).is_file(), link


def test_a_page_is_self_contained(finished: Path) -> None:
    html = (finished / "report" / "small" / "index.html").read_text(encoding="utf-8")
    assert html.count("<svg") > 5
    assert not re.search(r"https?:|//[a-z]|<script |<img|@import|url\((?!#)", html)
    assert len(html) < 1_500_000
    assert not re.search(r"(?:fill|stroke): #", html), "a colour that is the same in the dark"


def test_what_units_were_made_with_is_said_in_words(three: tuple[Path, str]) -> None:
    _, html = three
    assert "<dd>torch 2.13.0, transformers 5.23.0</dd>" in html
    assert "<dt>Batches</dt><dd>padded to a multiple of 8 rows" in html
    assert "row_multiple" not in html


@pytest.mark.slow
def test_same_input_gives_same_bytes(finished: Path, tmp_path: Path) -> None:
    """The command drew the figures in other processes."""
    write_report(Store.open(finished), "small", MODEL, tmp_path, token_text=token_reader(MODEL))
    command = finished / "report" / "small"
    assert len(page_files(command)) > 40
    for name in page_files(command):
        assert (tmp_path / name).read_bytes() == (command / name).read_bytes(), name


@pytest.mark.parametrize("table", ["decomposition", "gap", "eos_contrasts", "saturation"])
def test_printed_numbers_are_the_estimates(three: tuple[Path, str], table: str) -> None:
    folder, html = three
    check_printed(check(html).tables[f"table-{table}"], records(folder, table))


def test_differences_to_the_baseline_are_the_estimates() -> None:
    """By R, each with its bytes beside the baseline's; documents of a question are one cluster."""
    views = make_views(("snapkv-half", "recent-10", "recent-half"), documents_each=12)
    for row in views.views["documents"]:
        row["cluster"] = row["doc"] if row["stratum"] != "VT-4K" else f"question {row['doc'][-1]}"
    content = content_of(views)
    table = contrasts.contrasts_table(content)
    assert [(row.cells[0].text, row.cells[0].under, row.cells[1].text) for row in table.rows] == [
        ("recent-10", "added after the plan", "0.20"), ("recent-half", "", "1.00"),
    ]  # fmt: skip
    a = action_numbers("snapkv-half", 0.0)
    for name, *cells in (row.cells for row in table.rows):
        contrast = contrast_numbers(action_numbers(name.text, 0.0), a)
        expected = [100 * contrast["gap"], contrast["mean_entry_difference"], 100 * contrast["exposure_term"]]
        assert [number(cell.text) for cell in cells[1:4]] == pytest.approx(expected, abs=0.0501)
    counts = {row.cells[0].text: row.cells[2] for row in documents_table(content.facts).rows}
    assert (counts["VT-4K"].text, counts["VT-4K"].under) == ("12", "10 clusters")


def test_intervals_that_may_hold_the_truth_less_often_are_marked() -> None:
    """Such intervals have few clusters, or a few documents decide the number; the note gives the reasons that occur."""
    sure = Estimate(
        "pooled", "a", None, "mismatch", None, 0.2, 0.1, 0.3, 0.95, 2000, clusters=24, interval="studentized"
    )
    skewed, few = replace(sure, interval="skewed"), replace(sure, clusters=8)
    cells = estimate_cells([sure, skewed, few], Scale.PERCENT, {})
    assert [cell.mark for cell in cells] == ["", "*", "*"]
    assert status_note([sure]) == "Exploratory, pointwise 95% intervals."
    because = {
        (skewed,): "decided by a few documents",
        (few,): "from fewer than 20 clusters of documents",
        (skewed, few): "from fewer than 20 clusters of documents or decided by a few documents",
    }
    for rows, words in because.items():
        assert status_note([sure, *rows]).endswith(f"; * {words}: the interval may hold the truth less often.")


def test_no_share_is_printed_of_a_gap_that_may_be_nothing(page: Page) -> None:
    views = make_views(documents_each=12)

    def beside() -> set[str]:
        bars = {"recent-half": ("recent-half", "pooled")}
        _, texts = term_bars(content_of(views).estimates, "snapkv-half", bars, GAP_TERMS).axes
        return {text.get_text() for text in texts.texts}

    assert any(text.endswith("%") for text in beside())
    for row in views.views["estimates"]:
        if row["quantity"] == "gap" and row["stratum"] in {"pooled", "VT-4K"}:
            row["low"], row["high"] = -0.5, 0.5
    assert "–" in beside()
    assert not any(text.endswith("%") for text in beside())
    rows = check(page(views)).tables["table-gap"]
    assert rows[1][0] == "recent-half"
    assert [cell == "–" for cell in rows[1][1:]] == [False] * 4 + [True] * 3


def test_the_figure_of_strata_has_their_estimates() -> None:
    content = content_of(make_views(THREE))
    figure = strata_figure(content)
    strata = ["pooled", *content.facts.strata]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == strata
    shown = {
        "generation_gap_change": (content.others, content.baseline),
        "late_minus_early": (content.actions, None),
        "late_minus_early_pre_eos": (content.actions, None),
    }
    for axes, (quantity, (actions, baseline)) in zip(figure.axes, shown.items(), strict=True):
        expected = [
            100 * (content.estimates.get(quantity, action, baseline, stratum=stratum).estimate or 0.0)
            for stratum in strata for action in actions
        ]  # fmt: skip
        assert [bars[0].get_xdata()[0] for bars in axes.containers] == pytest.approx(expected), quantity


@pytest.mark.usefixtures("no_pdf")
def test_empty_windows_leave_gaps_not_errors(tmp_path: Path) -> None:
    """A horizon too short for lag windows and for the first block: their quantities are null."""
    views = make_views(strata=("NIAH-4K",))
    views.set_windows(Windows.of(H, early_last=0, late_first=33, first_block_last=0, second_block_last=0))
    for row in views.views["estimates"]:
        if "early" in row["quantity"] or "late" in row["quantity"] or row["quantity"].startswith("generation_"):
            row["estimate"] = row["low"] = row["high"] = None
    tables = check(build(tmp_path, views, draw=these_alone("two_clocks", "clocks_by_stratum"))).tables
    assert tables["table-generation_gaps"][0] == ["action", "g, –pp", "g, –pp", "g, 1–64pp", "Δgpp"]


def test_standing_of_estimates_is_said(page: Page) -> None:
    actions = ("snapkv-half", "recent-half", "recent-10")
    html = page(make_views(actions, strata=ONE))
    tables = check(html).tables
    marked = {row[0]: row[1].split(" ")[0][-1] for row in tables["table-saturation"][1:]}
    assert marked == {"snapkv-half": "†", "recent-half": "†", "recent-10": "‡"}
    assert [row[0] for row in tables["table-primary"]].count("saturation positions with saturated δ") == 2
    without = page(make_views(actions, strata=ONE, planned=False))
    assert "†" not in without
    assert "No plan was frozen" in without
    assert "table-primary" not in check(without).ids
    assert "Exploratory, pointwise 95% intervals." in without


def seen(views: FakeViews, **plan: Any) -> FakeViews:
    """The outcomes of all planned estimates were known when they were planned; the plan has further entries."""
    for row in views.views["estimates"]:
        row["status"] = "seen" if row["status"] == "prespecified" else row["status"]
    (first,) = views.views["plans"]
    content = json.loads(first["plan"])
    content |= plan | {"actions": [*content["actions"], *plan.get("actions", ())]}
    if plan:
        later = first | {"plan_revision": 1, "plan_sha256": "ef" * 32, "plan": json.dumps(content)}
        views.views["plans"] = [later, first]
    return views


def test_what_was_seen_before_its_plan_is_not_called_prespecified(page: Page) -> None:
    """Without an entry of the plan, its action was redone; the plan says if documents had been evaluated before it."""
    tables = check(page(seen(make_views(strata=ONE)))).tables
    assert {row[-1] for row in tables["table-primary"][1:]} == {"seen"}
    assert {row[1].split(" ")[0][-1] for row in tables["table-saturation"][1:]} == {"§"}
    redone, of_store, of_study = (
        plan.section(content_of(seen(make_views(strata=ONE), **entries))).values["seen"]
        for entries in ({}, {"seen": True}, {"seen": True, "evaluated_documents": 12})
    )
    assert "redone" in redone
    assert "another study" in of_store
    assert "this study" in of_study


def test_a_later_revision_of_a_plan_is_said_on_the_page(page: Page) -> None:
    """The later revision names an action that was added when 12 documents had been evaluated."""
    actions = ("snapkv-half", "recent-half", "recent-10")
    assert content_of(make_views(actions, strata=ONE)).facts.added == ["recent-10"]
    views = seen(make_views(actions, strata=ONE), seen=True, revision=1, evaluated_documents=12, actions=["recent-10"])
    facts = content_of(views).facts
    assert facts.added == []
    assert facts.plan is not None
    assert (facts.plan.revision, facts.plan.evaluated, facts.plan.sha256) == (1, 12, "ef" * 32)
    html = page(views)
    assert "Revision 1" in html
    assert "ef" * 32 in html
    assert "ab" * 32 not in html


def test_strata_are_in_the_order_of_their_lengths_and_a_baseline_may_be_named() -> None:
    strata = ("RULER-16K", "RULER-8K", "RULER-128K")
    content = content_of(make_scalar_views(strata=strata, documents_each=1), baseline="recent-half")
    assert content.facts.strata == ["RULER-8K", "RULER-16K", "RULER-128K"]
    assert (content.actions, content.baseline_reason) == (["recent-half", "snapkv-half"], "as requested")
    styles = action_styles(list(HAZARD))
    assert len({style.colour for style in styles.values()}) == len({str(s.dashes) for s in styles.values()}) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("no_pdf")
def test_markup_in_names_is_text(tmp_path: Path) -> None:
    odd = "<b>&half$x$</b>"
    views = make_views(("_plain", odd), strata=('<i>S</i> q"1\x01',))
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
    for file in (tmp_path / "figures").glob("*.svg"):
        ET.parse(file)  # noqa: S314 - our own: it is well formed


def test_a_name_that_looks_like_a_formula_is_text_in_a_spreadsheet(tmp_path: Path, page: Page) -> None:
    page(make_views(("=cmd|' /C calc'!A0", "@half"), strata=ONE))
    rows = [line for file in (tmp_path / "tables").glob("*.csv") for line in csv.reader(file.open(encoding="utf-8"))]
    cells = {cell for row in rows for cell in row}
    assert {"'=cmd|' /C calc'!A0", "'@half"} < cells
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]
    assert any(cell.startswith("-0.") for cell in cells), "negative numbers stay numbers"


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


def notices(html: str) -> str:
    return " ".join(re.findall(r'<p class="notice">(.*?)</p>', html))


def test_what_limits_the_numbers_is_a_notice(page: Page) -> None:
    """A control that moved, development documents alone, events after the analysis, and strata without a document."""
    views = make_views(strata=ONE)
    assert notices(page(views)) == ""
    views.views["controls"][1]["moved_pairs"] = 1
    html = page(views)
    assert "The control full" in notices(html)
    assert "full: δ and f are NOT 0" in html
    assert "development documents" in notices(page(make_views(strata=ONE, split="development", analyzed=False)))
    views = make_views(strata=ONE)
    for row in views.views["decomposition"]:
        if row["action"] == "recent-half":
            row["mismatch"] += 0.01
    assert "analysis of recent-half;" in notices(page(views))
    views = make_views()
    for rows in views.views.values():
        for row in rows:
            if row.get("stratum") == "VT-4K":
                row |= {name: None for name in ("mismatch", "estimate") if name in row}
    html = page(views, preliminary="The study is still running.")
    assert "No evaluation document of VT-4K is measured" in notices(html)
    assert "The study is still running." in notices(html)
    assert "all strata but those without a measured document" in html


def test_documents_without_events_are_counted_apart() -> None:
    views = make_views()
    views.views["documents"] += [
        row | {"doc": f"{row['doc']}x", "split": "evaluation"} for row in views.views["documents"][:5]
    ]
    content = content_of(views)
    rows = dict(study_rows(content.facts, content.estimates, content.actions))
    assert rows["Documents"] == "12 evaluation, 6 development, 3 strata; 5 more are listed but not measured"


def test_unknown_quantities_are_not_hidden(page: Page) -> None:
    views = make_views(("snapkv-half",), strata=ONE)
    views.views["estimates"] += estimate_rows("pooled", "snapkv-half", None, {"new_quantity": 0.123})
    checker = check(page(views))
    assert "table-gap" not in checker.ids, "there is one action"
    rows = checker.tables["table-other"]
    assert rows[1][0].strip() == "new_quantity"
    assert rows[1][3].startswith("12.3 %")


def test_wrong_names_are_one_line_errors(page: Page) -> None:
    views = make_views(strata=ONE)
    with pytest.raises(InputError, match="half-cache / kvdrift/tiny"):
        page(views, "kvdrift/tin")
    with pytest.raises(InputError, match="did you mean 'recent-half'"):
        page(views, baseline="recent-hal")
    whole = views.views["decomposition"]
    views.views["decomposition"] = []
    with pytest.raises(InputError, match="no derived trajectories yet"):
        page(views)
    views.views["decomposition"] = whole
    views.views["actions"] = [row for row in views.views["actions"] if row["control"]]
    with pytest.raises(InputError, match="nothing to report"):
        page(views)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixed(100 * 0.9375, 1), "93.8"), (fixed(93.74999999999999, 1), "93.8"), (fixed(-93.25, 1), "−93.3"),
        (fixed(93.7499, 1), "93.7"), (fixed(0.125, 2), "0.13"), (fixed(float("inf"), 1), "inf"),
        (fixed(-0.04, 1), "0.0"), (fixed(-1.26, 1), "−1.3"), (fixed(None, 1), MISSING), (fixed(12345.6, 0), "12,346"),
        (size(1536), "1.5 KiB"), (size(80), "80 B"), (duration(90), "90.0 s"), (duration(7200), "2.0 h"),
        (count_range([4, None, 9]), "4–9"), (count_range([]), MISSING),
        (significant(52.71), "52.7"), (significant(0.0123456), "0.0123"), (significant(1234.5), "1,235"),
        (significant(289.0), "289"), (significant(0.0), "0"), (significant(-0.5), "−0.500"), (significant(None), MISSING),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_plan_section_has_spreads_and_what_precision_costs(three: tuple[Path, str]) -> None:
    _, html = three
    tables = check(html).tables
    endpoint = tables["table-plan_endpoints"][1]
    assert endpoint[2:] == ["7.00 pp", "5.00 pp", "10.00 pp", "1.50 pp", MISSING]  # roots of the components, in points
    assert [row[:2] for row in tables["table-cost_curve"][1:]] == [["4", "48"], ["16 chosen", "12"], ["64", "3"]]
    assert "<dt>expected time</dt><dd>2.0 h</dd>" in html
    assert html.index("windows] SHA-256") > html.index("Inputs of the plan") > html.index("<dt>alpha, over")
    assert "<dd>folds: 6; margin: −0.02; observations: positions</dd>" in html


def test_reduced_estimates_have_a_table_and_their_plan_a_column(three: tuple[Path, str]) -> None:
    folder, html = three
    tables = check(html).tables
    rows = {row[0]: row for row in tables["table-reduced"][1:]}
    for action in THREE:
        value = 100 * action_numbers(action, 0.0)["mismatch"]
        assert number(rows[action][1].split(" ", 1)[0]) == pytest.approx(1.01 * value, abs=0.0501)
    assert [record["quantity"] for record in records(folder, "reduced")][:2] == ["mismatch", "exposure"]
    endpoint = {"quantity": "gap", "action": "a", "baseline": "b", "variance_between_replicates": 0.01}
    plan = {"primary_endpoints": [endpoint], "reduction": [endpoint | {"variance_ratio": 0.641}]}
    table = endpoints_table(plan)
    assert table is not None
    assert [(column.head, cell.text) for column, cell in zip(table.columns, table.rows[0].cells, strict=True)][-1] == (
        "reduced variance", "0.64",
    )  # fmt: skip


def test_windows_say_from_where_actions_are_ordered(three: tuple[Path, str]) -> None:
    tables = check(three[1]).tables
    low, high = (action_numbers(action, 0.0)["mismatch"] for action in ("snapkv-half", "recent-half"))
    first = next(depth for depth in range(1, H + 1) if high * depth / H > low + (1 - low) * (1 - depth / H))
    assert tables["table-action_ordering"][1][0] == "recent-half"
    assert tables["table-action_ordering"][1][-1] == f"L = {first}"
    depths = [row[0] for row in tables["table-identified_interval"][1:] if len(row) > 1]
    assert depths == ["1", "8", "16", "32", "64"] * 3


def test_panels_of_windows_reach_as_far_as_r_may() -> None:
    """If R is small at every depth, a scale to 100% would show nothing."""
    grid = new_figure(9, 3).subplots(1, 2, squeeze=False)
    rows = {"half": [{"depth": depth, "lower": 0.03, "upper": 0.07 / depth} for depth in (1, 2)]}
    window_panels(grid, rows, action_styles(["half"]), Windows.of(2))
    assert grid[0, 0].get_ylim() == (0, pytest.approx(8.05))
    rows["half"][0]["upper"] = 0.97
    window_panels(grid, rows, action_styles(["half"]), Windows.of(2))
    assert grid[0, 0].get_ylim() == (0, 101)
    assert not grid[0, 1].get_visible()


def test_calibration_shows_every_candidate_and_its_decision(three: tuple[Path, str]) -> None:
    tables = check(three[1]).tables
    heading, *rows = tables["table-calibration"][1:8]
    assert heading == ["recent-half − snapkv-half: ΔR = 20.00 pp"]
    assert [row[0] for row in rows] == ["fixed history", "positions 1–16"] * 3
    assert [(row[1], row[5]) for row in rows[::2]] == [
        ("ridge selected", "equivalent"), ("cell mean", "unresolved"), ("flat, uncalibrated", "different"),
    ], "by the size of their errors"  # fmt: skip
    assert rows[0][4] == "−0.40 [−1.6, 0.8]"
    assert len(tables["table-uncalibrated"]) == 3


def test_sections_without_rows_say_so_in_a_line(page: Page) -> None:
    views = make_views(strata=ONE)
    gone = {"identified_interval", "action_ordering", "calibration", "entry", "eos_partition"}
    views.views |= {view: [] for view in gone}
    views.views["estimates"] = [
        row for row in views.views["estimates"] if row["quantity"] not in {"entry_cdf", "eos_gap", "survival", "hazard"}
    ]
    html = page(views)
    assert not {"figure-depth", "figure-calibration", "figure-entry_cdf", "table-eos_partition"} & set(check(html).ids)
    assert html.count('<p class="absent">') == 5, "of these four, and of answers that are not scored"


PAPERS_WINDOWS = Windows.of(128)
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


def paper_views(windows: Windows = PAPERS_WINDOWS, sampling: Sampling = FULL_SOFTMAX) -> FakeViews:
    """The study as if it were of the paper's model and windows, beside the paper's numbers."""
    views = make_views(strata=("VT-4K",))
    for rows in views.views.values():
        for row in rows:
            if "model" in row:
                row["model"] = LLAMA
    views.views["published"] = PAPER
    views.set_windows(windows)
    views.views["studies"][0].update(asdict(sampling))
    views.views["published_comparison"] = compared_with_paper(views)
    return views


def compared_with_paper(views: FakeViews) -> list[Row]:
    """The rows of the view ``published_comparison`` over the rows of ``views``."""
    numbers = {"value", "low", "high", "level"}
    columns = {name: pa.float64() if name in numbers else pa.string() for name in contract("published").columns}
    estimated = [column for column in TABLES["results"].schema if column.name in contract("estimates").columns]
    read = {"published": pa.schema(columns), "windows": TABLES["studies"].schema, "units": TABLES["units"].schema,
            "studies": TABLES["studies"].schema, "estimates": pa.schema(estimated)}  # fmt: skip
    with duckdb.connect() as connection:
        for view, schema in read.items():
            connection.from_arrow(pa.Table.from_pylist(views.rows(view).to_pylist(), schema=schema)).create(view)
        rows: list[Row] = connection.sql(view_texts()["published_comparison"]).to_arrow_table().to_pylist()
    return rows


@pytest.mark.usefixtures("no_pdf")
def test_published_numbers_stand_beside_ours(tmp_path: Path) -> None:
    html = build(tmp_path, paper_views(), LLAMA)
    tables = check(html).tables
    gap = dict(zip(tables["table-gap"][0], tables["table-gap"][1], strict=True))
    assert gap["ΔRpp"].endswith("published 20.8")
    assert gap["exposure share%"].endswith("published 84.7")
    assert "published" not in gap["rate share%"]
    assert tables["table-generation_gaps"][1][1].endswith("published 37.2")
    assert re.search(r"published 61\.[01]$", tables["table-entry"][1][1])
    assert tables["table-entry"][1][-1].endswith("published 30.4")
    assert "published 288 / 4,723" in tables["table-branch"][1][2]
    found = {(row["action"], row["quantity"]): row["published"] for row in records(tmp_path, "branch_by_stratum")}
    assert float(found["snapkv-half", "late_minus_early"]) == pytest.approx(0.0421)
    assert not found["recent-half", "late_minus_early"]
    ridge = tables["table-calibration"][3]
    assert ridge[4].endswith("published −0.39")
    assert ridge[5].endswith("published equivalent")
    assert ridge[6].endswith("published 4.09")
    words = re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
    assert "11.1" not in words
    assert "22.2<" not in words
    for figure in ("entry_cdf", "gap_terms", "two_clocks", "calibration"):
        assert "open: published" in (tmp_path / "figures" / f"{figure}.svg").read_text(encoding="utf-8")
    row = next(row for row in records(tmp_path, "gap") if row["quantity"] == "gap")
    assert [float(row[f"published{end}"]) for end in ("", "_low", "_high")] == pytest.approx([0.2079, 0.1906, 0.2251])


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        (Windows.of(64), "another horizon"),
        (Windows.of(128, first_block_last=16), "the default windows"),  # "1-32" is no block of this study
        (Windows.of(128, saturation_threshold=0.9), "the default windows"),
    ],
)
@pytest.mark.by_default("windows1-the default windows")
def test_published_numbers_of_other_windows_are_not_compared(page: Page, windows: Windows, named: str) -> None:
    content = content_of(paper_views(windows), model=LLAMA)
    assert named in content.published.mismatch
    assert not content.estimates.have_published
    html = page(paper_views(windows), LLAMA)
    assert content.published.mismatch in html
    assert "published</small>" not in html


@pytest.mark.parametrize(
    ("sampling", "words"), [(Sampling(0.0), "greedy"), (Sampling(0.7, 0.9), "temperature 0.7, top-p 0.9")]
)
@pytest.mark.by_default("sampling0-greedy")
def test_a_page_says_its_law_and_compares_it_with_no_other(page: Page, sampling: Sampling, words: str) -> None:
    views = paper_views(sampling=sampling)
    assert views.views["published_comparison"] == [] != paper_views().views["published_comparison"]
    content = content_of(views, model=LLAMA)
    assert "temperature 1" in content.published.mismatch
    assert content_of(paper_views(), model=LLAMA).published.mismatch == ""
    html = page(views, LLAMA)
    (head,) = re.findall(r"<h1>.*</h1>", html)
    assert f" {LLAMA} · {words} · " in head
    assert "published</small>" not in html
    assert ("δ and f are 0 or 1" in html) == sampling.greedy


@pytest.mark.parametrize(
    ("model", "same"),
    [(LLAMA, True), ("/models/llama-3.1-8b-instruct/", True), ("Llama-3.1-8B-Instruct", True),
     ("x/not-Llama-3.1-8B-Instruct", False), ("meta-llama/Llama-3.1-8B", False)],
)  # fmt: skip
def test_models_match_by_the_end_of_their_id(model: str, same: bool) -> None:  # noqa: FBT001
    assert is_model(model, "Llama-3.1-8B-Instruct") is same
    assert not is_model(model, None)


def test_latex_is_whole_and_escaped(tmp_path: Path, page: Page) -> None:
    odd = r"a_b & 50% #1 ~^\{x}$"
    html = page(make_views(("snapkv-half", odd, "recent-half"), strata=ONE), latex=True)
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
    bounds = tables["table-gap"][1][1].split(" ", 1)[1]
    assert re.search(r"\[[^]]*\]", bounds)[0].replace("−", "-") in text.replace("$-$", "-")  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50% & a_b", r"50\% \& a\_b"), ("ΔE · C̄", r"$\Delta$E $\cdot$ $\bar{C}$"), ("τ≤T", r"$\tau\le$T"),
     ("$−1", r"\$$-$1"), ("G₁", "G$_1$"), ("\\{}", r"\textbackslash{}\{\}"), ("a–b", "a--b")],
)  # fmt: skip
def test_signs_become_latex(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_a_noise_floor_is_marked(page: Page) -> None:
    """The floor stands beside every action; a page without a floor does not mention one."""
    html = page(make_views(("snapkv-half", "recent-half", "numerics-floor"), strata=ONE))
    assert html.count("numerics-floor<small>noise floor</small>") >= 2
    assert "noise floor" not in page(make_views(strata=ONE)).lower()


def test_names_of_actions_in_the_plan_stay_as_they_are() -> None:
    plan = {"swrb": {"pair_cost": 2, "seconds_of_action": {"cache-q4_0": 0.5, "cache-q8_0": None}}}
    ((label, text),) = plan_rows(plan, {"swrb": "residual branching"})
    assert label == "residual branching"
    assert text == "pair cost: 2; seconds of action: cache-q4_0: 0.5; cache-q8_0: –"
