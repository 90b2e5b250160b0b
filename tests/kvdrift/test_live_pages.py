"""``kvdrift report --live``: the page of a study that still moves, and its end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.report_views import check, records
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study

import kvdrift
from kvdrift.flows.pages.live import LiveStore, StudySnapshot
from kvdrift.flows.pages.reports import report_folder
from kvdrift.flows.run import stages
from kvdrift.live import live_folder, write_live_pages
from kvdrift.log.store import Store
from kvdrift.report.page import RELOADING


class LookedOnceError(Exception):
    """Ends the command at its first pause."""


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: float) -> None:
        raise LookedOnceError

    monkeypatch.setattr("kvdrift.live.time.sleep", stop)


@pytest.mark.usefixtures("once", "undrawn")
def test_a_study_that_moves_has_a_page_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Development documents alone, not derived by anybody else: they are derived, and nothing is stored of estimates."""
    run = run_of(load_study(write_study(tmp_path)), tmp_path / "store")
    stages.prepare(run)
    pages_before = list((tmp_path / "store").glob("report/**/*.html"))
    with pytest.raises(LookedOnceError):  # nothing is derived yet, and there is nothing to show
        write_live_pages(str(tmp_path / "store"), None, None, 1.0)
    assert not pages_before
    assert not list((tmp_path / "store").glob("report/**/*.html"))
    stages.develop(run)
    with pytest.raises(LookedOnceError):
        write_live_pages(str(tmp_path / "store"), None, None, 1.0)
    page = tmp_path / "store" / "report" / "small" / "live" / "index.html"
    assert capsys.readouterr().out.startswith(f"preliminary: {page} (")
    html = page.read_text(encoding="utf-8")
    check(html)
    assert "<b>Preliminary.</b>" in html
    assert RELOADING in html
    assert not Store.open(tmp_path / "store").read("results").num_rows
    views = kvdrift.open(tmp_path / "store")
    query = "select action, mismatch from decomposition where stratum = 'pooled' and action <> 'full'"
    by_view = dict(views.sql(query).fetchall())
    shown = [
        row
        for row in records(page.parent, "estimates")
        if row["quantity"] == "mismatch" and row["stratum"] == "pooled" and row["action"] in by_view
    ]
    assert {row["action"]: float(row["estimate"]) for row in shown} == pytest.approx(by_view)
    assert {(row["status"], row["draws"]) for row in shown} == {("exploratory", "400")}


def test_the_preliminary_page_then_leads_to_the_report(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "index.html"
    page.write_text("another page")
    assert call(capsys, "report", finished, "--live", "-o", tmp_path)[0] == 0
    assert page.read_text() == "another page"
    page.write_text(f"<label {RELOADING}></label>")
    assert call(capsys, "report", finished, "--live", "-o", tmp_path)[0] == 0
    html = page.read_text(encoding="utf-8")
    assert RELOADING not in html
    assert "small is finished" in html
    (link,) = re.findall('<a href="(.*?)">', html)
    assert (tmp_path / link).resolve() == report_folder(Store.open(finished), "small") / "index.html"


def test_ctrl_c_ends_it_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvdrift.live.time.sleep", interrupted)
    stages.prepare(run_of(load_study(write_study(tmp_path)), tmp_path / "store"))
    assert call(capsys, "report", tmp_path / "store", "--live") == (0, "", "")


def test_studies_of_one_model_have_their_page_in_their_report_s_folder(finished: Path, tmp_path: Path) -> None:
    """Studies of several temperatures share a page, too; studies of several models have a folder each."""
    store = Store.open(finished)
    (cold,) = LiveStore(store).snapshots()
    warm, other = replace(cold, study="warm"), replace(cold, model="other")
    report = finished / "report" / "small"

    def folder(own: StudySnapshot, output: Path | None, *looks: StudySnapshot) -> Path:
        return live_folder(store, own, output, [(look.study, look.model) for look in looks])

    assert folder(cold, None, cold, warm) == report / "live"
    assert folder(other, None, cold, other) == report / "other" / "live"
    assert folder(warm, tmp_path, cold, warm) == tmp_path / "warm"
    assert folder(cold, tmp_path, cold) == tmp_path


def test_it_is_of_one_store(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no study 'smal'" in mistake(capsys, "report", finished, "--live", "--study", "smal")
    assert "--live: takes one store" in mistake(capsys, "report", finished, tmp_path, "--live")
