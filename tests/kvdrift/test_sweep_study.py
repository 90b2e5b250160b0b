"""A study of sweeps: its plan, its gate, ``--redo`` and its page know each member by name."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.small_study import TEXT, evaluate, run_of
from fixtures.study_files import load_study

from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import begun_revisions
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.log.store import Store
from kvdrift.report.page import build_report
from kvdrift.report.reading.estimates import Provenance
from kvdrift.report.sections.section import Drawing
from kvdrift.sql.catalog import Views, open_views

SWEEPS = """
[[actions]]
name = "snapkv"
selector = "snapkv"
keep = ["1/4", "1/2"]

[[actions]]
name = "bits"
codec = ["int8", { name = "int4", residual = 16 }]

[plan]"""
MEMBERS = ["snapkv@1/4", "snapkv@1/2", "bits@int8", "bits@int4"]


def swept_text() -> str:
    """The small study with one stratum, and two sweeps in place of its actions."""
    head, _, plan = TEXT.partition("[plan]")
    parts = head.split("[[")
    whole = [part for part in parts if not part.startswith("actions") and "tracking" not in part]
    text = "[[".join(whole) + SWEEPS + plan.replace('"snapkv-half"', '"snapkv@1/2"')
    assert {one["stratum"] for one in tomllib.loads(text)["documents"]} == {"needle"}
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StudyRun:
    folder = tmp_path_factory.mktemp("swept")
    (folder / "swept.toml").write_text(swept_text(), encoding="utf-8")
    run = run_of(load_study(folder / "swept.toml"), folder / "store")
    evaluate(run)
    stages.analyze(run)
    return run


@pytest.fixture(scope="module")
def views(run: StudyRun) -> Iterator[Views]:
    with open_views(run.store) as opened:
        yield opened


def test_the_plan_names_members(run: StudyRun) -> None:
    plan = find_plan(run.store, "small", "kvdrift/tiny")
    assert plan is not None
    assert plan.content["baseline"] == "snapkv@1/2"
    assert plan.content["actions"] == MEMBERS
    primary = {(one["quantity"], one["action"]) for one in plan.content["primary_endpoints"]}
    assert primary == {("gap", member) for member in MEMBERS if member != "snapkv@1/2"} | {
        ("mismatch", member) for member in MEMBERS
    }


def test_the_gate_names_members(run: StudyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answer is the estimate of the two, which the plan has named."""
    asked = ("gate", run.location, "--quantity", "mismatch", "--baseline", "snapkv@1/2", "--no-page")
    code, out, err = call(capsys, *asked, "--action", "snapkv@1/4", "--margin", "0.02", "--json")
    answer = json.loads(out)
    with open_views(Store.open(run.location)) as opened:
        rows = opened.rows("decomposition", split="evaluation", stratum="pooled").to_pylist()
    risk = {row["action"]: row["mismatch"] for row in rows}
    assert (err, answer["exit_code"], answer["status"]) == ("", code, "prespecified")
    assert answer["estimate"] == pytest.approx(risk["snapkv@1/4"] - risk["snapkv@1/2"], abs=1e-12)
    assert answer["estimate"] > 0
    _, out, _ = call(capsys, *asked, "--action", "bits@int8", "--margin", "0.02")
    assert "mismatch, bits@int8 less snapkv@1/2: " in out
    line = mistake(capsys, *asked, "--action", "snapkv", "--margin", "0.02")
    assert "--action snapkv: no such action; did you mean 'snapkv@1/" in line


def test_a_member_is_redone_alone(run: StudyRun) -> None:
    (row,) = begun_revisions([run], ["snapkv@1/4"])
    assert (row["action"], row["action_revision"]) == ("snapkv@1/4", 1)


def test_the_page_has_a_curve_for_each_sweep(views: Views, tmp_path: Path) -> None:
    """And a table of all members, fewest bytes first, with the ends of the bands."""
    names: set[str] = set()

    def draw(drawings: Sequence[Drawing], _: Path) -> dict[str, str]:
        (own,) = [one for one in drawings if one.name == "sweeps"]
        names.update(text.get_text() for axes in own.draw().axes for text in axes.texts)
        return {one.name: "<svg></svg>" for one in drawings}

    page = build_report(views, "small", "kvdrift/tiny", tmp_path, draw=draw, provenance=Provenance("swept"))
    assert {"snapkv", "bits"} <= names
    text = page.read_text(encoding="utf-8")
    assert "The bands hold for all 4 members of all sweeps together with probability 95%" in text
    with (tmp_path / "tables" / "sweeps.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    held = {row["action"]: row["resident_bytes"] for row in views.rows("units").to_pylist()}
    order = list(dict.fromkeys(line["action"] for line in lines))
    assert order == sorted(MEMBERS, key=lambda member: held[member])
    points = {row["action"]: row for row in views.rows("decomposition", stratum="pooled").to_pylist()}
    shown = {line["action"]: line for line in lines if line["quantity"] == "mismatch_simultaneous"}
    for member in MEMBERS:
        low, estimate, high = (float(shown[member][name]) for name in ("low", "estimate", "high"))
        assert estimate == pytest.approx(points[member]["mismatch"], abs=1e-12)
        assert low <= estimate <= high
