"""Files of documents and of facts that ``kvdrift ingest`` reads: every format, what they apply to, and their errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fixtures.command import call
from fixtures.event_logs import DOCS, LOG, Run, command, documents_csv, make_log, write
from fixtures.refusals import refused

import kvdrift
from kvdrift.ingestion import records
from kvdrift.ingestion.ingest import IngestReport, ingest
from kvdrift.ingestion.records import read_documents, read_facts_file
from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views
from kvdrift.transforms.streams.live_files import ingest_pieces


def rows_of(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"documents.{kind}"
    if kind == "csv":
        names = list(rows[0])
        path.write_text(
            "\ufeff" + "\n".join([",".join(names), *(",".join(f'"{row[name]}"' for name in names) for row in rows)])
        )
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_documents_in_every_format(tmp_path: Path, run: Run, kind: str) -> None:
    docs = ["007", "NA", "1e3"]
    rows = [
        {
            "doc": doc, "split": "evaluation", "stratum": "null", "prompt_tokens": 9, "cluster": "c", "task": "qa",
            "colour": "red",
        }
        for doc in docs
    ]  # fmt: skip
    if kind != "csv":
        rows = [row | {"answers": ["a", "b"], "study": None} for row in rows]
    report = run(make_log(docs), documents=rows_of(tmp_path, kind, rows))
    assert report.findings == []
    assert report.remarks == [f"{tmp_path}/documents.{kind}: columns ignored: colour"]
    stored_rows = Store.open(tmp_path / "store").read("documents").to_pylist()
    assert sorted(row["doc"] for row in stored_rows) == sorted(docs)
    assert {(row["stratum"], row["prompt_tokens"], row["cluster"], row["task"]) for row in stored_rows} == {
        ("null", 9, "c", "qa")
    }
    assert stored_rows[0]["answers"] == (None if kind == "csv" else ["a", "b"])
    assert run(make_log(docs), documents=None).present.units == 6, "the store knows them now"


def test_documents_of_one_study_or_of_all(tmp_path: Path, run: Run) -> None:
    rows = [{"doc": "d0", "stratum": "all", "split": "evaluation"}, {"doc": "d1", "stratum": "own", "split": "evaluation", "study": "ext"},
            {"doc": "d1", "stratum": "b", "split": "evaluation", "study": "b", "model": "m2"}]  # fmt: skip
    path = rows_of(tmp_path, "jsonl", rows)
    logs = [
        make_log(["d0", "d1"]), make_log(["d0", "d1"], study="b", model="m2"), make_log(["d1"], study="b", model="m3"),
    ]  # fmt: skip
    report = run(*logs, documents=path)
    assert [(finding.kind, finding.key["model"]) for finding in report.findings] == [("document", "m3")] * 2
    found = Store.open(tmp_path / "store").read("documents").to_pylist()
    assert {(row["study"], row["doc"]): row["stratum"] for row in found} == {
        ("ext", "d0"): "all", ("b", "d0"): "all", ("ext", "d1"): "own", ("b", "d1"): "b"}  # fmt: skip


def test_an_empty_text_says_nothing(run: Run, tmp_path: Path) -> None:
    """As in CSV: documents of the cluster "" would all be of one."""
    empty = {"stratum": "S", "split": "evaluation", "cluster": "", "task": " ", "study": ""}
    path = rows_of(tmp_path, "jsonl", [{"doc": doc, **empty} for doc in ("d0", "d1")])
    assert run(make_log(["d0", "d1"]), documents=path).findings == []
    rows = Store.open(tmp_path / "store").read("documents").to_pylist()
    assert {(row["doc"], row["study"], row["cluster"], row["task"]) for row in rows} == {
        ("d0", "ext", "d0", None), ("d1", "ext", "d1", None)}  # fmt: skip


def test_documents_that_contradict_the_store(run: Run, tmp_path: Path) -> None:
    run(make_log(["d0"]))
    rows = [
        {"doc": "d0", "stratum": "S0", "split": "evaluation"},
        {"doc": "d1", "stratum": "S1", "split": "evaluation", "cluster": "d0"},
    ]
    report = run(make_log(["d0", "d1"]), documents=rows_of(tmp_path, "jsonl", rows))
    texts = {finding.key["doc"]: finding.text for finding in report.findings}
    assert texts["d0"] == f"split is 'evaluation' ({tmp_path}/documents.jsonl, line 1), but the store has 'development'"
    where = f"{tmp_path}/documents.jsonl, line 3"  # an empty line follows each row
    assert texts["d1"] == f"split is 'evaluation' ({where}), but cluster 'd0' is in split 'development'"
    assert Store.open(tmp_path / "store").read("documents").num_rows == 1
    same = [{"doc": "d0", "stratum": "S0", "split": "development", "task": None}]
    assert run(make_log(["d0"]), documents=rows_of(tmp_path, "jsonl", same)).findings == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("doc,stratum\nd0,S\n", "no column 'split'; a document has doc, stratum, split"),
        ("doc,stratum,split\nd0,S,test\n", "line 2: split is 'test'; known: development, evaluation"),
        ("doc,stratum,split\nd0,S,evalution\n", "line 2: split is 'evalution'; did you mean 'evaluation'?"),
        ("doc,stratum,split\nd0,pooled,evaluation\n", "line 2: stratum is 'pooled', which names the rows that pool all strata; choose another"),
        ("doc,stratum,split\nd0,S,evaluation\nd0,S,evaluation\n", "line 3: document 'd0' has another row ("),
        ("doc,stratum,split,study\nd0,S,evaluation,\nd0,T,evaluation,b\n", "line 3: document 'd0' has another row ("),
        ("doc,stratum,split,cluster\nd0,S,evaluation,c\nd1,S,development,c\n", "line 3: split is 'development', but cluster 'c' is in split 'evaluation' ("),
        ("doc,stratum,split\n,S,evaluation\n", "line 2: doc is missing"),
        ("doc,stratum,split\nd0,S\n", "line 2: the number of fields differs from the header's"),
        ("doc,stratum,split,prompt_tokens\nd0,S,evaluation,many\n", "line 2: prompt_tokens is 'many', must be a whole number"),
        ('{"doc": "d0", "stratum": "S", "split": "evaluation", "answers": ["a", ""]}', "line 1: answers is ['a', ''], must be a list of strings that are not empty"),
        ('{"doc": 7, "stratum": "S", "split": "evaluation"}\n', "line 1: doc is 7, must be a string"),
        ('{"doc": "d0", "stratum": "S"}\n', "line 1: split is missing"),
        ('{"doc": "d0", "stratum": " ", "split": "evaluation"}\n', "line 1: stratum is missing"),
        ('{"doc": "d0"\n', "line 1: not JSON"),
        ('["d0"]\n', "line 1: not a JSON object; write one object per line"),
        ("[" * 100_000, "line 1: not JSON (maximum recursion depth exceeded"),
        ('{"doc": "d0", "prompt_tokens": ' + "9" * 5000, "line 1: not JSON (Exceeds the limit (4300 digits)"),
        ('{"doc": "d0", "stratum": "S", "split": "evaluation", "prompt_tokens": ' + "9" * 4000 + "}", f"line 1: prompt_tokens is {'9' * 80}…, must be a whole"),
        ('{"doc": "d\\ud800", "stratum": "S", "split": "evaluation"}', "line 1: doc is 'd\\ud800', must be a string"),
        (f"doc,stratum,split\n{'x' * 200_000},S,evaluation\n", "not CSV (field larger than field limit"),
        ('doc,stratum,split\nd0,S,"evil\n\x1b[2J"\n', "split is 'evil\ufffd\ufffd[2J'; known: development, evaluation"),
        ("", "no column 'doc', 'stratum', 'split'"),
    ],
)  # fmt: skip
def test_a_documents_file_that_cannot_be_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "documents").write_text(text)
    log = write(tmp_path / "log.parquet", LOG)
    code, out, err = command(capsys, log, "--store", tmp_path / "store", "--documents", tmp_path / "documents")
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith(f"kvdrift: {tmp_path}/documents")
    assert err.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_documents_files_that_memory_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"doc": f"d{number}", "stratum": "S", "split": "evaluation"} for number in range(4)]
    paths = [rows_of(tmp_path, kind, rows) for kind in ("csv", "jsonl", "parquet")]
    monkeypatch.setattr(records, "MOST_ROWS", 3)
    for path in paths:
        assert refused(read_documents, path) == f"{path}: 4 rows, a documents file may have 3 at most"
    monkeypatch.setattr(records, "MOST_BYTES", 20)
    assert refused(read_documents, paths[0]).endswith(" bytes, a documents file may have 20 at most")
    monkeypatch.setattr(records, "MOST_ROWS", 4)
    many = pa.table({name: ["x" * 9999] * 4 for name in rows[0]})
    pq.write_table(many, paths[2], compression="zstd", use_dictionary=False)
    monkeypatch.setattr(records, "MOST_BYTES", 9999)
    assert refused(read_documents, paths[2]).endswith(" bytes, must be 9,999 at most")


def test_documents_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut").write_bytes(b"PAR1abc")
    assert "no such documents file" in refused(read_documents, tmp_path / "nowhere")
    assert "neither Parquet nor UTF-8 text" in refused(read_documents, tmp_path / "binary")
    assert "cannot be read as Parquet" in refused(read_documents, tmp_path / "cut")


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


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_foreign_events_names_their_engine_and_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.flows.estimate.estimation.EXPLORATORY_DRAWS", 100)
    taken(tmp_path, write_facts(tmp_path))
    for name in ("derive", "analyze", "report"):
        assert call(capsys, name, tmp_path / "store")[0] == 0
    (page,) = (tmp_path / "store" / "report").rglob("index.html")
    text = re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8"))
    for words in ("mine, mine 1.2", "the reference with cache bf16", "cache fp8", "noise floor"):
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


@pytest.mark.parametrize(
    ("one", "other", "tie"),
    [
        ({"doc": "d"}, {"study": "s"}, True),
        ({"study": "s", "doc": "d"}, {"study": "s", "model": "m"}, True),
        ({"study": "s", "doc": "d"}, {"study": "other", "model": "m"}, False),  # no unit has both
        ({"study": "s", "doc": "d"}, {"model": "m"}, False),
        ({"doc": "d", "device": "cpu"}, {"study": "s", "payload_bytes": None, "device": "cpu"}, False),
    ],
)  # fmt: skip
def test_no_order_of_rows_decides_between_facts(
    tmp_path: Path, one: dict[str, object], other: dict[str, object], *, tie: bool
) -> None:
    """A row that gives more of the four columns wins; of two that give as many, none does."""
    first = {"action": "a", "payload_bytes": 1, **one}, {"action": "a", "payload_bytes": 2, **other}
    for rows in (first, first[::-1]):
        path = write_facts(tmp_path, rows=[{"action": "b", "doc": "d", "payload_bytes": 3}, *rows])
        if tie:
            line = refused(read_facts_file, path)
            assert all(f"line {number}" in line for number in (2, 3)), line
            assert "action 'a'" in line
            assert "payload_bytes" in line
        else:
            read_facts_file(path)


def test_a_file_of_facts_has_actions_and_each_once(tmp_path: Path) -> None:
    path = write_facts(tmp_path, rows=[{"action": "a"}, {"action": "a", "payload_bytes": 1}])
    assert "action 'a' has another row (" in refused(read_facts_file, path)
    (tmp_path / "facts.csv").write_text("payload_bytes\n5\n")
    assert refused(read_facts_file, tmp_path / "facts.csv").endswith("no column 'action'; a row of facts has action")
    assert "no such facts file" in refused(read_facts_file, tmp_path / "none.csv")
