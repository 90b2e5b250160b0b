"""The section on the looks of a sequential study: the look at which it stopped, and the result of every look."""

from __future__ import annotations

import json

import pytest
from fixtures.report_views import MODEL, PAIR, STUDY, FakeViews, Row, content_of, make_scalar_views

from kvdrift.report.reading.content import PageContent
from kvdrift.report.sections.plan import Progress, looks_section, progress, sequence_figure
from kvdrift.report.sections.section import Section

HALF_WIDTH = {"resolve": "half_width", "bound": 0.1}


def looks(*half_widths: float | None) -> list[Row]:
    """One endpoint of each action: its interval at every look, None without one."""
    return [
        {
            "study": STUDY, "model": MODEL, "split": "evaluation", "stratum": "pooled", "action": action, "baseline": None,
            "look": look, "quantity": "mismatch", "documents": 12 * look, "clusters": 12 * look, "estimate": 0.3,
            "low": None if half is None else 0.3 - half, "high": None if half is None else 0.3 + half,
            "interval": None if half is None else "student", "resolved": half is not None and half <= 0.1,
            "level": 0.975, "constant": 2.0, "draws": 100, "events_version": look, "plan_sha256": "ab" * 32,
        }
        for action in PAIR
        for look, half in enumerate(half_widths, 1)
    ]  # fmt: skip


def read(rows: list[Row], planned: dict[str, object] | None) -> PageContent:
    views: FakeViews = make_scalar_views()
    plan = views.views["plans"][0]
    if planned is not None:
        plan["plan"] = json.dumps(
            json.loads(plan["plan"])
            | {"sequential": planned | {"looks": [{"share": share} for share in (0.5, 0.75, 1.0)]}}
        )
    views.views["sequence"] = rows
    return content_of(views)


def made(rows: list[Row], planned: dict[str, object] | None) -> Section | None:
    return looks_section(read(rows, planned))


@pytest.mark.parametrize(
    ("rows", "expected", "stopped"),
    [
        ([], Progress(3, 0, 0, 0), False),
        (looks(None, 0.3), Progress(3, 2, 2, 2), False),
        (looks(None, 0.05), Progress(3, 2, 2, 0), True),
        (looks(None, 0.3, 0.2), Progress(3, 3, 2, 2), True),
        (looks(None, 0.2, 0.1), Progress(3, 3, 2, 0), True),
    ],
)
def test_how_far_a_study_is(rows: list[Row], expected: Progress, stopped: bool) -> None:  # noqa: FBT001
    content = read(rows, HALF_WIDTH)
    assert progress(content) == expected
    assert expected.stopped is stopped
    found = looks_section(content)
    assert found is not None
    assert found.values["progress"] == expected


def test_every_look_has_its_row() -> None:
    found = made(looks(None, 0.05), HALF_WIDTH)
    assert found is not None
    (table,) = found.tables
    cells = [[cell.text for cell in row.cells] + [row.cells[3].under, row.group] for row in table.rows]
    first, second = (f"positions with different tokens: {action}" for action in sorted(PAIR))
    assert cells == [
        ["1", "12", "12", "30.00 %", "–", "no", "no interval yet", first],
        ["2", "24", "24", "30.00 %", "student", "yes", "25.00 to 35.00", first],
        ["1", "12", "12", "30.00 %", "–", "no", "no interval yet", second],
        ["2", "24", "24", "30.00 %", "student", "yes", "25.00 to 35.00", second],
    ]


def test_the_median_unbiased_estimate_stands_beside_the_one_that_ended_the_study() -> None:
    """Only one action was open at look 1, and passed it by; the other one's estimate had no part in going on.

    At the first look the two are equal; a study that ends by widths has none.
    """
    sign = {"resolve": "sign", "bound": 0.0}
    rows = looks(0.35, 0.2)
    for row in rows:
        row["resolved"] = row["look"] == 2 or row["action"] == max(PAIR)
    found = made(rows, sign)
    assert found is not None
    assert found.values["corrected"] is True
    (table,) = found.tables
    place = [column.head for column in table.columns].index("median-unbiased")
    texts = [row.cells[place].text for row in table.rows]
    assert (texts[0], *texts[2:]) == ("—", "—", "30.00")
    assert 20 < float(texts[1]) < 30
    at_once = [row | {"resolved": True} for row in looks(0.2)]
    (table,) = made(at_once, sign).tables  # type: ignore[union-attr]
    assert [row.cells[place].text for row in table.rows] == ["30.00", "30.00"]
    (table,) = made(looks(None, 0.05), HALF_WIDTH).tables  # type: ignore[union-attr]
    assert "median-unbiased" not in [column.head for column in table.columns]


@pytest.mark.parametrize(
    ("planned", "lines"),
    [
        (HALF_WIDTH, {20.0, 40.0}),
        ({"resolve": "equivalence", "bound": 0.02}, {-2.0, 2.0}),
        ({"resolve": "sign", "bound": 0.0}, {0.0}),
    ],
)
def test_the_bounds_of_resolution_are_drawn(planned: dict[str, object], lines: set[float]) -> None:
    figure = sequence_figure(looks(0.3, 0.05), planned)
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert {round(float(y), 9) for line in dashed for y in line.get_ydata()} == lines


def test_a_study_of_a_fixed_size_has_no_such_section() -> None:
    content = read(looks(None, 0.05), None)
    assert progress(content) is None
    assert made([], None) is None
