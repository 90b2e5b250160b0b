"""What ``status``, ``verify``, ``gate`` and pages say to somebody who watches a store, or a running study."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.command import call, mistake
from fixtures.event_logs import H, documents_csv, ends_after, make_log, without, write
from fixtures.house import ROOT
from fixtures.report_views import check, records
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study
from prometheus_client.openmetrics.parser import text_string_to_metric_families as of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as of_older_text

import kvdrift
from kvdrift.commands.status import metrics_text
from kvdrift.flows.pages.live import LiveStore, StudySnapshot
from kvdrift.flows.pages.reports import report_folder
from kvdrift.flows.run import stages
from kvdrift.live import live_folder, write_live_pages
from kvdrift.log.last_times import record_estimates, record_run
from kvdrift.log.store import Store
from kvdrift.log.studies import count_waiting
from kvdrift.report.page import FILES, RELOADING, page_files
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.schema.tables import PAIR_COLUMNS

LOG, EIGHTH = ends_after(make_log(), 7), ends_after(make_log(replicates=[8]), 7)


def take(folder: Path, name: str, log: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--documents", documents_csv(folder), "--pieces", "--horizon", str(H))
    assert call(capsys, "ingest", write(folder / name, log), "--store", folder / "store", *options)[0] == 0


def status_of(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(capsys, "status", store, "--json")[1])
    return found


@pytest.fixture
def waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A store in which replicates wait: all of document d3, and two replicates of d2 under one action."""
    late = pc.greater(LOG["t"], 7)
    of_d2 = pc.and_(pc.equal(LOG["doc"], "d2"), pc.and_(pc.equal(LOG["action"], "half"), pc.less(LOG["replicate"], 2)))
    first = LOG.filter(pc.invert(pc.and_(late, pc.or_(pc.equal(LOG["doc"], "d3"), of_d2))))
    take(tmp_path, "first.parquet", first, capsys)
    return tmp_path / "store"


@pytest.mark.slow
def test_what_waits_is_counted_until_it_is_whole(
    waiting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status_of(waiting, capsys)
    assert found["waiting"] == [{"study": "ext", "model": "org/m", "replicates": 10, "documents": 2}]
    assert [study["waiting_replicates"] for study in found["studies"]] == [10]
    said = "10 replicates of 2 documents"
    assert f"waiting: {said} of study ext, model org/m" in call(capsys, "status", waiting)[1]
    code, out, _ = call(capsys, "verify", waiting)
    assert code == 0, out
    assert "pieces: 10 replicates" in out
    assert f"note: study ext, model org/m: {said} wait" in out
    assert call(capsys, "derive", waiting)[0] == 0
    assert said in call(capsys, "analyze", waiting)[2]
    assert call(capsys, "report", waiting)[0] == 0
    page = waiting / "report" / "ext" / "index.html"
    assert f"{said} wait" in page.read_text()

    # More replicates wait, and no event is new: only the page is out of date.
    assert status_of(waiting, capsys)["studies"][0]["next"] is None
    take(tmp_path, "more.parquet", EIGHTH.filter(pc.less(EIGHTH["t"], 5)), capsys)
    found = status_of(waiting, capsys)
    assert found["waiting"][0]["replicates"] == 10 + 4 * 2
    assert found["studies"][0]["next"] == f"kvdrift report {waiting}"

    # One of the two replicates of d2 becomes whole, in a file whose other replicate still waits.
    d2 = LOG.filter(pc.equal(LOG["doc"], "d2"))
    take(tmp_path, "second.parquet", without(d2, action="half", replicate=1), capsys)
    (one,) = status_of(waiting, capsys)["waiting"]
    assert (one["replicates"], one["documents"]) == (9 + 4 * 2, 4)
    take(tmp_path, "third.parquet", pa.concat_tables([LOG, EIGHTH]), capsys)
    found = status_of(waiting, capsys)
    assert (found["waiting"], found["studies"][0]["waiting_replicates"]) == ([], 0)
    assert "waiting:" not in call(capsys, "status", waiting)[1]
    assert "pieces:" not in call(capsys, "verify", waiting)[1]


def test_a_file_of_waiting_rows_that_cannot_be_read_is_named(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (waiting / "pieces").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DamagedStoreError, match=str(file)):
        count_waiting(Store.open(waiting))
    code, out, _ = call(capsys, "verify", waiting)
    assert code == 1
    assert f"fault: pieces: {file}: cannot be read" in out


@pytest.mark.usefixtures("undrawn")
def test_times_and_sizes_in_json_and_pages_that_are_pruned_and_made_again(
    waiting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = status_of(waiting, capsys)
    assert [before[name] for name in ("last_run", "last_estimate", "last_check", "check_faults")] == [None] * 4
    lowest = datetime.now(UTC).replace(microsecond=0)
    for command in ("derive", "analyze", "verify"):
        assert call(capsys, command, waiting)[0] == 0
    record_run(str(waiting), "ext", "org/m")
    after = status_of(waiting, capsys)
    (study,) = after["studies"]
    for name in ("last_run", "last_estimate", "last_check"):
        assert after[name].endswith("Z")
        assert lowest <= datetime.fromisoformat(after[name]) <= datetime.now(UTC)
    assert (study["last_run"], study["last_estimate"]) == (after["last_run"], after["last_estimate"])
    assert after["check_faults"] == 0
    files = [path for path in waiting.rglob("*") if path.is_file()]
    assert after["size"]["files"] == len(files)
    assert after["size"]["bytes"] == sum(path.stat().st_size for path in files)
    events = [path for path in files if waiting / "events" in path.parents]
    assert after["size"]["tables"]["events"] == {
        "files": len(events), "bytes": sum(path.stat().st_size for path in events),
    }  # fmt: skip

    assert call(capsys, "report", waiting)[0] == 0
    folder = waiting / "report" / "ext"
    for kept in (folder / "gates.json", folder / "tables" / "mine.csv"):
        kept.write_text("[]")
    hostile = ["../../.checked", "tables/../gates.json", str(waiting / ".checked"), ""]
    (folder / FILES).write_text(json.dumps([*page_files(folder), *hostile]))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    listed = {path: path.stat().st_size for path in waiting.rglob("*") if path.is_file() and folder not in path.parents}

    assert call(capsys, "report", waiting, "--prune", "1d")[1].startswith("nothing to delete: ")
    for path in (*before, *(waiting / ".last").iterdir()):
        os.utime(path, (0, 0))
    assert call(capsys, "report", waiting, "--prune", "1d")[1].startswith("nothing"), "it was estimated today"
    code, out, _ = call(capsys, "report", waiting, "--prune", "0m", "--study", "ext")
    assert code == 0
    gone = sum(len(content) for path, content in before.items() if not path.exists())
    left = {path for path in folder.rglob("*") if path.is_file()}
    assert left == {folder / "gates.json", folder / "tables" / "mine.csv"}
    assert out == f"deleted: {folder} ({len(before) - 2} files, {gone / 1e6:,.1f} MB)\n"
    assert listed == {path: path.stat().st_size for path in listed}, "nothing else is touched"
    assert status_of(waiting, capsys)["studies"][0]["next"] == f"kvdrift report {waiting}"
    assert call(capsys, "report", waiting)[0] == 0
    again = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert again.keys() == before.keys()
    assert all(again[path] == before[path] for path in before if path.name not in {FILES, "inputs.json"})

    record_estimates(str(waiting), "ext", "org/m", 10**6)  # by a process that was killed before it stored them
    assert status_of(waiting, capsys)["last_estimate"] is None
    assert "last estimates: no record" in call(capsys, "status", waiting)[1], "there are estimates, so never is wrong"


def test_a_verification_with_faults_is_counted(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(Store.open(waiting).files("events")[0]).write_bytes(b"damaged")
    assert call(capsys, "verify", waiting, "--since", "1d")[0] == 1
    counted = status_of(waiting, capsys)["check_faults"]
    assert counted
    assert f"UTC, {counted} fault" in call(capsys, "status", waiting)[1]


def samples(text: str, parse: Any) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of a text by metric, with the values of their labels but the store's."""
    found = dict[str, dict[tuple[str, ...], float]]()
    for family in parse(text):
        assert family.type == "gauge"
        assert family.documentation
        found[family.name] = {}
        for sample in family.samples:
            assert sample.timestamp is None
            labels = tuple(value for name, value in sample.labels.items() if name != "store")
            found[family.name][labels] = sample.value
    return found


def test_metrics_are_what_the_status_is(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(str(waiting), "ext", "org/m")
    status = status_of(waiting, capsys)
    code, text, err = call(capsys, "status", waiting, "--metrics")
    assert (code, err) == (0, "")
    assert text.endswith("\n# EOF\n")
    found = samples(text, of_openmetrics)
    assert samples(text, of_older_text) == found
    own = ("ext", "org/m")
    (study,) = status["studies"]
    assert found["kvdrift_units"] == {own: study["units"]}
    assert found["kvdrift_underived_units"] == {own: study["units"]}, "nothing is derived yet"
    assert found["kvdrift_waiting_replicates"] == {own: 10}
    at = datetime.fromisoformat(study["last_run"]).timestamp()
    assert found["kvdrift_last_run_timestamp_seconds"] == {own: at}
    assert found["kvdrift_last_check_timestamp_seconds"] == {}, "what has never been has no sample"
    assert found["kvdrift_table_bytes"]["events",] == status["size"]["tables"]["events"]["bytes"]
    assert found["kvdrift_store_bytes"][()] > sum(found["kvdrift_table_bytes"].values())
    assert found["kvdrift_documents"] == {(*own, "development"): 2, (*own, "evaluation"): 1}
    units = {family.name: family.unit for family in of_openmetrics(text)}
    assert units["kvdrift_store_bytes"] == "bytes"
    assert units["kvdrift_last_run_timestamp_seconds"] == "seconds"


def test_any_name_can_be_a_label_and_no_control_character_is_printed(
    waiting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_of(waiting, capsys)
    for parse in (of_openmetrics, of_older_text):
        for name in ('a"b', "a\\b", "a\nb", 'a}b,c="d', "é ☃", "\\n"):
            status["store"] = status["studies"][0]["study"] = name
            assert samples(metrics_text(status), parse)["kvdrift_units"].keys() == {(name, "org/m")}
    names = ["a\r", "a\x1b[31m", "a\x1b", "a\x00", "a\u2028", "a\udc80"]
    status["studies"] = [status["studies"][0] | {"study": name} for name in names]
    text = metrics_text(status)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    for parse in (of_openmetrics, of_older_text):
        assert len(samples(text, parse)["kvdrift_units"]) == len(names), "names stay apart"


def test_the_documentation_names_every_key_and_metric(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    heads = re.findall(r"^\| (?:key|metric).*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    of_store, of_study, metrics = (
        set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*", rows, re.MULTILINE)))) for rows in heads
    )
    status = status_of(waiting, capsys)
    (study,) = status["studies"]
    assert status.keys() == of_store
    assert study.keys() == of_study
    assert {family.name for family in of_openmetrics(metrics_text(status))} == metrics


def test_one_form_at_a_time(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json and --metrics" in mistake(capsys, "status", waiting, "--metrics", "--json")
    assert "leave --watch out" in mistake(capsys, "status", waiting, "--metrics", "--watch")


def test_what_prune_refuses(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'old' is no age" in mistake(capsys, "report", waiting, "--prune", "old")
    assert "--prune: " in mistake(capsys, "report", waiting, "--prune", "1d", "--live")


def test_an_action_of_another_generator_beside_a_study_of_ours(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is estimated, and no run is recommended that could not make its events."""
    store = Store.open(copied)
    events = store.read("events", columns=PAIR_COLUMNS)
    docs = store.documents("small", "kvdrift/tiny", ["doc", "split"])
    evaluated = docs.filter(pc.equal(docs["split"], "evaluation"))["doc"].to_pylist()[:2]
    own = events.filter(
        pc.and_(pc.equal(events["action"], "recent-half"), pc.is_in(events["doc"], pa.array(evaluated)))
    )
    theirs = own.set_column(3, "action", pa.repeat(pa.scalar("theirs"), len(own)))
    assert call(capsys, "ingest", write(tmp_path / "theirs.parquet", theirs), "--store", copied)[0] == 0
    assert call(capsys, "derive", copied)[0] == 0
    assert call(capsys, "analyze", copied)[0] == 0
    estimated = store.read("results", columns=["action", "split", "estimate"]).to_pylist()
    assert any(row["action"] == "theirs" and row["estimate"] is not None for row in estimated)
    (study,) = status_of(copied, capsys)["studies"]
    assert {(work["action"], work["reason"]) for work in study["pending"]} == {("theirs", "of another generator")}
    assert "run" not in (study["next"] or "")


# kvdrift report --live: the page of a study that still moves, and its end


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
