"""Facts files: bytes and engines of events that another generator made, their frontier and floor, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fixtures.command import call
from fixtures.event_logs import DOCS, documents_csv, make_log, write
from fixtures.refusals import refused

import kvdrift
from ingestion.facts import read_facts_file
from ingestion.ingest import ingest
from ingestion.report import IngestReport
from ingestion.stream import ingest_pieces
from log.store import Store
from sql.catalog import open_views

ENGINE = {"engine": "mine", "library": "mine 1.2", "reference": {"cache": "bf16"}, "environment": {}}
FACTS = [
    {"action": "floor", "payload_bytes": 1000, "prompt_entries": 10, "kept_entries": 10, "engine": ENGINE},
    {"action": "half", "payload_bytes": 500, "scale_bytes": 20, "engine": ENGINE, "settings": {"cache": "fp8"}},
    {"action": "half", "doc": DOCS[0], "payload_bytes": 600},
]


def write_facts(folder: Path, kind: str = "jsonl", rows: list[dict[str, object]] = FACTS) -> Path:
    path = folder / f"facts.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    flat = [
        {name: json.dumps(value) if isinstance(value, dict) else value for name, value in row.items()} for row in rows
    ]
    names = list(dict.fromkeys(name for row in flat for name in row))
    table = pa.table({name: [row.get(name) for row in flat] for name in names})
    if kind == "csv":
        pa.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


def taken(folder: Path, facts: Path, **options: object) -> IngestReport:
    log = write(folder / "log.parquet", make_log(actions=["half", "floor"]))
    return ingest(folder / "store", [log], documents_csv(folder), facts=facts, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.by_default("csv")
def test_the_frontier_of_foreign_events(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    report = taken(tmp_path, write_facts(tmp_path, kind))
    assert (report.findings, report.remarks) == ([], [])
    assert call(capsys, "derive", tmp_path / "store")[0] == 0
    with open_views(Store.open(str(tmp_path / "store"))) as views:
        rows = views.rows("frontier", split="evaluation", stratum="pooled").to_pylist()
        units = views.rows("units", doc=DOCS[0], action="half").to_pylist()
    assert {row["action"]: row["cache_share"] for row in rows}.keys() == {"half", "floor"}
    assert all(row["cache_share"] is not None for row in rows)
    assert next(row["cache_share"] for row in rows if row["action"] == "floor") == 1.0
    assert (units[0]["payload_bytes"], units[0]["scale_bytes"], units[0]["index_bytes"]) == (600, 20, 0)
    assert units[0]["resident_bytes"] == 620
    assert json.loads(units[0]["engine"]) == ENGINE


def test_the_page_of_foreign_events_names_their_engine_and_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken(tmp_path, write_facts(tmp_path))
    for name in ("derive", "analyze", "report"):
        assert call(capsys, name, tmp_path / "store")[0] == 0
    (page,) = (tmp_path / "store" / "report").rglob("index.html")
    text = re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8"))
    for words in ("mine, mine 1.2", "the reference with cache bf16", "cache fp8", "the floor"):
        assert words in text, words
    assert "full cache" not in re.sub(r"<(script|style|svg)[\s\S]*?</\1>", "", text)
    with kvdrift.open(tmp_path / "store") as views:
        settings = dict(views.sql("select action, settings from actions").fetchall())
    assert settings == {"half": '{"cache": "fp8"}', "floor": "{}"}


def test_pieces_have_facts_too(tmp_path: Path) -> None:
    log = make_log(actions=["half"])
    paths = [
        write(tmp_path / f"{place}.parquet", log.slice(place * len(log) // 2, len(log) // 2)) for place in range(2)
    ]
    ingest_pieces(tmp_path / "store", paths, documents_csv(tmp_path), 12, facts=write_facts(tmp_path))
    units = Store.open(str(tmp_path / "store")).units("ext", "org/m")
    assert set(units["scale_bytes"].to_pylist()) == {20}


def test_what_belongs_to_no_unit_is_told(tmp_path: Path) -> None:
    facts = write_facts(tmp_path, rows=[{"action": "quarter", "payload_bytes": 5, "colour": "red"}])
    remarks = taken(tmp_path, facts).remarks
    assert remarks == [f"{facts}: columns ignored: colour", f"{facts}: no appended unit has action quarter"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"payload_bytes": 5}, "line 1: action is missing"),
        ({"action": "a", "payload_bytes": -5}, "payload_bytes is -5, must be a whole number of bytes"),
        ({"action": "a", "kept_entries": 1.5}, "kept_entries is 1.5, must be a whole number of entries"),
        ({"action": "a", "prefill_seconds": "soon"}, "prefill_seconds is 'soon', must be a number of seconds"),
        ({"action": "a", "engine": "vllm"}, "engine is 'vllm', must be a JSON object"),
        (
            {"action": "a", "doc": "d", "settings": {}},
            "settings belongs to a whole action; give it in a row without doc",
        ),
        ({"action": "a", "device": 3}, "device is 3, must be a string"),
    ],
)
def test_facts_that_cannot_be_taken(tmp_path: Path, row: dict[str, object], said: str) -> None:
    assert said in refused(read_facts_file, write_facts(tmp_path, rows=[row]))


def test_a_file_of_facts_has_actions_and_each_once(tmp_path: Path) -> None:
    path = write_facts(tmp_path, rows=[{"action": "a"}, {"action": "a", "payload_bytes": 1}])
    assert "action 'a' has another such row" in refused(read_facts_file, path)
    (tmp_path / "facts.csv").write_text("payload_bytes\n5\n")
    assert refused(read_facts_file, tmp_path / "facts.csv").endswith("no column 'action'; a row of facts has action")
    assert "no such facts file" in refused(read_facts_file, tmp_path / "none.csv")
