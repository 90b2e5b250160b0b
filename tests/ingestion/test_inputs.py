"""Where events may be: formats, folders, Delta tables, patterns and URLs; and what is passed over or named instead."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, write_deltalake
from fixtures.event_logs import LOG, H, canonical, command, documents_csv, edit, stored, write, write_as
from fixtures.refusals import refused
from fixtures.s3_server import s3_server

from kvdrift.ingestion import formats
from kvdrift.ingestion.files import EventFile
from kvdrift.ingestion.ingest import IngestReport, ingest
from kvdrift.schema.location import filesystem_of
from kvdrift.transforms.streams.live_files import SETTLED_SECONDS, ingest_pieces

FIRST, SECOND = LOG.slice(0, 192), LOG.slice(192)
TEXTS = ("csv", "csv.gz", "csv.zst", "jsonl", "jsonl.gz", "jsonl.zst")


def take(folder: Path, *files: str | Path, **options: Any) -> IngestReport:
    return ingest(folder / "store", files, documents_csv(folder), **options)


def holds(folder: Path, log: pa.Table = LOG) -> bool:
    return stored(folder / "store").equals(canonical(log))


# Formats


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("end", [*TEXTS, "stream", "stream.gz", "stream.zst"])
@pytest.mark.by_default("csv-False", "csv.gz-True", "jsonl.zst-False", "jsonl-True", "stream-True", "stream.gz-False")
def test_every_format_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, *, pieces: bool
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 3000)
    path = write_as(tmp_path / f"log.{end}", LOG.append_column("extra", LOG["doc"]))
    file = EventFile(path)
    assert (file.rows, file.unknown_columns, file.ends) == (LOG.num_rows, ["extra"], end.endswith(("gz", "zst")))
    documents = documents_csv(tmp_path)
    report = ingest_pieces(tmp_path / "store", [path], documents, H) if pieces else take(tmp_path, path)
    assert (report.findings, report.taken.events) == ([], LOG.num_rows)
    assert holds(tmp_path)


def test_text_may_be_written_in_several_ways(tmp_path: Path) -> None:
    """Whole numbers with a point, flags in all spellings, a byte order mark, empty lines, columns in any order."""
    lines = [",".join(names := LOG.column_names[::-1])]
    for number, row in enumerate(LOG.to_pylist()):
        row |= {name: f"{row[name]}.0" for name in ("t", "x_token", "replicate")}
        row["x_eos"] = (str(row["x_eos"]).lower(), str(row["x_eos"]), str(int(row["x_eos"])))[number % 3]
        lines.append(",".join(str(row[name]) for name in names))
    (tmp_path / "log.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    assert take(tmp_path, tmp_path / "log.csv").findings == []
    assert holds(tmp_path)
    rows = [row | {"x_eos": int(row["x_eos"]), "y_token": float(row["y_token"])} for row in LOG.to_pylist()]
    rows[9]["note"] = {"nested": [1]}
    (tmp_path / "log.json").write_text("\n\n".join(map(json.dumps, rows)))
    report = take(tmp_path, tmp_path / "log.json")
    assert (report.findings, report.present.events) == ([], LOG.num_rows)


CSV_FAULTS: list[tuple[str, str, str]] = [
    ("t", "two", "t is 'two', must be an integer"),
    ("x_token", "271.5", "x_token is 271.5, must be an integer"),
    ("delta", "0,25", "13 fields, but the first line names 12 columns"),
    ("y_eos", "maybe", "y_eos is 'maybe', must be true, false, 1 or 0"),
    ("doc", '"d0', "cannot be read as CSV"),
    ("doc", "x" * 200_000, "the line is longer than 65,536 bytes"),
]
JSON_FAULTS: list[tuple[str, Any, str]] = [
    ("t", "2", "t is '2', must be an integer"),
    ("x_token", 271.5, "x_token is 271.5, must be an integer"),
    ("f", True, "f is True, must be a number"),
    ("doc", 7, "doc is 7, must be a string"),
    ("y_eos", "yes", "y_eos is 'yes', must be true, false, 1 or 0"),
    ("y_eos", 1, "y_eos is 1, must be true or false, as in the first line"),
]


@pytest.mark.parametrize(("name", "text", "message"), CSV_FAULTS, ids=[fault[2][:25] for fault in CSV_FAULTS])
def test_a_value_of_csv_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 1 << 16)
    path = write_as(tmp_path / "log.csv", LOG)
    lines = path.read_text().splitlines()
    fields = lines[300].split(",")
    fields[LOG.column_names.index(name)] = text
    path.write_text("\n".join([*lines[:300], ",".join(fields), *lines[301:]]))
    (finding,) = take(tmp_path, path, write(tmp_path / "other.parquet", LOG)).findings
    assert finding.text.startswith(f"{path}, line 301: {message}")
    assert holds(tmp_path), "other files go in"


@pytest.mark.parametrize(("name", "value", "message"), JSON_FAULTS, ids=[fault[2][:20] for fault in JSON_FAULTS])
def test_a_value_of_json_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 3000)
    rows = LOG.to_pylist()
    rows[300][name] = value
    assert finding_of(tmp_path, map(json.dumps, rows)).startswith(f"{tmp_path}/log.jsonl, line 301: {message}")


def finding_of(folder: Path, lines: Iterable[str]) -> str:
    """Return the one finding about lines of JSON, whose characters are bytes."""
    (folder / "log.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    (finding,) = take(folder, folder / "log.jsonl").findings
    return finding.text


@pytest.mark.parametrize("line", ["[1]", '{"t": 1', "{" * 100_000, '{"a":' * 100_000, "\xff"])
def test_a_line_of_json_that_is_no_object(tmp_path: Path, line: str) -> None:
    lines = [json.dumps(row) for row in LOG.to_pylist()]
    said = finding_of(tmp_path, [*lines[:9], line, *lines[9:]])
    assert said.startswith(f"{tmp_path}/log.jsonl, line 10: ")


def test_a_number_too_large_for_a_double(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in LOG.to_pylist()]
    lines[9] = re.sub('"delta": [^,]*', '"delta": 1e999', lines[9])
    said = finding_of(tmp_path, lines)
    assert "cannot be read as JSON Lines: JSON parse error: Number too big" in said
    assert "row" not in said, "Arrow counts the rows of a block"


def test_json_may_say_late_that_a_row_is_no_coupled_pair(tmp_path: Path) -> None:
    rows = LOG.to_pylist()
    rows[300]["kind"] = "scan"
    assert "row 301: kind is 'scan', must be 'coupled'" in finding_of(tmp_path, map(json.dumps, rows))


def test_nulls_and_large_numbers_of_text_keep_their_unit_out(tmp_path: Path) -> None:
    at = {"doc": "d1", "action": "half", "replicate": 2, "t": 5}
    for number, (name, value, kind) in enumerate([("delta", None, "null"), ("x_token", 2**40, "type")]):
        for end in ("csv", "jsonl"):
            folder = tmp_path / f"{number}{end}"
            folder.mkdir()
            report = take(folder, write_as(folder / f"log.{end}", edit(LOG, {name: value}, **at)))
            assert [finding.kind for finding in report.findings][:1] == [kind]
            assert report.taken.units == 7


def test_truncated_and_lying_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("csv.gz", "jsonl.zst", "stream.gz"):
        path = write_as(tmp_path / f"log.{end}", LOG)
        path.write_bytes(path.read_bytes()[:-20])
        assert "cannot be read" in refused(EventFile, path)
    packed = tmp_path / "log.parquet.gz"
    with pa.output_stream(str(packed), compression="gzip") as sink:
        sink.write(write(tmp_path / "log.parquet", LOG).read_bytes())
    assert "Parquet within gzip, must be decompressed" in refused(EventFile, packed)
    monkeypatch.setattr(formats, "MOST_BYTES", 2000)
    path = write_as(tmp_path / "log.stream", LOG)
    assert "must be 2,000 at most" in refused(EventFile, path)


# Folders


def foreign(folder: Path) -> None:
    """Put files beside logs that are none."""
    (folder / "README.txt").write_text("What these runs are: x_token and so on.\n")
    (folder / "part-0.parquet.crc").write_bytes(b"crc\0\0\0\2\0")
    (folder / "empty.done").write_bytes(b"")
    (folder / "harness.json").write_text('{\n "delta_t": 1\n}\n')
    write(folder / "documents.parquet", pa.table({"doc": ["d0"], "stratum": ["S"]}))
    documents_csv(folder)


def test_foreign_files_of_a_folder_are_passed_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    foreign(folder)
    write(folder / "log.parquet", LOG)
    names = [path.name for path in sorted(folder.iterdir()) if path.name != "log.parquet"]
    code, out, err = command(capsys, folder, "--store", tmp_path / "store", "--documents", folder / "documents.csv")
    assert code == 0
    assert [line.split(": ")[2] for line in err.splitlines()] == [f"passed over {folder}/{name}" for name in names]
    assert "files:         1\n" in out
    assert holds(tmp_path)
    for name in names:
        code, _, err = command(capsys, folder / name, "--store", tmp_path / "store")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"kvdrift: {folder}/{name}: ")
    (folder / "log.parquet").unlink()
    assert refused(take, tmp_path, folder) == f"{folder}: no event logs"
    (folder / "broken.parquet").write_bytes(b"junk")
    code, _, err = command(capsys, folder, "--store", tmp_path / "store")
    assert code == 2, "what its name calls an event log is not passed over"
    assert f"kvdrift: {folder}/broken.parquet: neither" in err


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, log in {"runs/a/1.parquet": FIRST, "runs/b/c/2.parquet": SECOND, "runs/_x/3.parquet": edit(LOG, {"t": 99}, doc="d0", action="half", replicate=0, t=1)}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True)
        write(tmp_path / name, log)
    (tmp_path / "runs/b/notes.txt").write_text("notes")
    monkeypatch.chdir(tmp_path)
    report = take(tmp_path, "runs/*/*")
    assert (report.files, report.taken.units, len(report.remarks)) == (2, 8, 1)
    assert holds(tmp_path)
    for pattern in ("runs/**/*.parquet", "runs/**", "./runs/[ab]", f"{tmp_path}/runs/**/?.parquet"):
        report = take(tmp_path, pattern)
        assert (report.files, report.present.units) == (2, 8)
    assert refused(take, tmp_path, "runs/*.arrow") == "runs/*.arrow: no file matches this pattern"
    write(tmp_path / "runs[1].parquet", LOG)
    assert take(tmp_path, "runs[1].parquet").present.units == 8


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    log = LOG.set_column(3, "action", pc.replace_substring(LOG["action"], "half", "half=50%, n/2"))
    parts = ds.partitioning(pa.schema([(name, pa.string()) for name in ("study", "model", "action")]), flavor="hive")
    for end, kind in (("parquet", "parquet"), ("csv", "csv"), ("arrow", "ipc")):
        ds.write_dataset(log, folder, partitioning=parts, format=kind, basename_template=f"part-{{i}}.{end}",
                         existing_data_behavior="overwrite_or_ignore")  # fmt: skip
    report = take(tmp_path, folder)
    assert (report.findings, report.taken.units, report.present.units) == ([], 8, 16)
    assert holds(tmp_path, log)
    (one,) = (folder / "study=ext" / "model=org%2Fm" / "action=full").glob("*.csv")
    assert take(tmp_path, one).present.units == 4
    own = folder / "study=another"
    own.mkdir()
    assert take(tmp_path, write(own / "1.parquet", log)).present.units == 8, "the file's own column counts"
    (null,) = take(tmp_path, write_null(tmp_path / "study=__HIVE_DEFAULT_PARTITION__", log)).findings
    assert "study is null" in null.text


def write_null(folder: Path, log: pa.Table) -> Path:
    folder.mkdir()
    return write(folder / "1.parquet", log.drop_columns(["study"]))


# Delta tables


def delta_table(folder: Path, log: pa.Table = LOG, **options: Any) -> Path:
    """A table whose rows came in two commits, with rows that were deleted, replaced and compacted."""
    write_deltalake(folder, pa.concat_tables([log.slice(0, 100), log.slice(0, 7)]), **options)
    write_deltalake(folder, log.slice(100), mode="append")
    table = DeltaTable(folder)
    table.delete("t <= 7 and doc = 'd0' and action = 'full' and replicate = 0")
    write_deltalake(folder, log.slice(0, 7), mode="append")
    return folder


@pytest.mark.parametrize("partition", [None, ["study", "action", "day"]])
def test_a_delta_table_is_read_as_one(tmp_path: Path, partition: list[str] | None) -> None:
    log = LOG.append_column("day", pc.replace_substring(LOG["doc"], "d", "2026-01-0")) if partition else LOG
    table = delta_table(tmp_path / "runs/table", log, partition_by=partition)
    assert len(list(table.rglob("*.parquet"))) > len(DeltaTable(table).file_uris())
    report = take(tmp_path, table)
    assert (report.files, report.findings, report.taken.units) == (1, [], 8)
    assert holds(tmp_path)
    write(tmp_path / "runs/other.parquet", LOG)
    write_deltalake(tmp_path / "runs/notes", pa.table({"note": ["these are runs"]}))
    report = take(tmp_path, tmp_path / "runs")
    assert (report.files, report.findings, report.present.units) == (2, [], 16)
    assert report.remarks[0].startswith(f"passed over {tmp_path}/runs/notes/")
    inside = next(table.rglob("*.parquet"))
    for part in (inside, tmp_path / "runs/table/**/*.parquet", *([inside.parent] if partition else [])):
        line = refused(take, tmp_path, part)
        assert line.endswith(f"is a part of the Delta table {table}; give the table's folder")


def test_a_delta_table_is_taken_again_once_it_has_changed(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, FIRST)
    taken: list[tuple[str, int]] = []

    def wait() -> Iterator[bool]:
        yield True
        write_deltalake(table, SECOND, mode="append")
        yield True
        yield False

    waits = wait()
    note: Callable[[str, IngestReport], None] = lambda name, report: taken.append((name, report.taken.events))  # noqa: E731
    ingest_pieces(tmp_path / "store", [table], documents_csv(tmp_path), H, taken=note, wait=lambda: next(waits))
    assert taken == [(str(table), FIRST.num_rows), (str(table), SECOND.num_rows)]
    assert holds(tmp_path)


def test_a_delta_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, LOG, configuration={"delta.enableDeletionVectors": "true"})
    (finding,) = take(tmp_path, table).findings
    assert finding.text.startswith(f"{table}: cannot be read as a Delta table: ")
    assert "deletionVectors" in finding.text
    other = write_damaged(tmp_path / "damaged")
    report = take(tmp_path, other, write(tmp_path / "log.parquet", LOG))
    assert [finding.file for finding in report.findings] == [str(other)]
    assert holds(tmp_path), "other logs go in"


def write_damaged(folder: Path) -> Path:
    (folder / "_delta_log").mkdir(parents=True)
    (folder / "_delta_log" / f"{0:020}.json").write_text("{}")
    return folder


# URLs


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An S3 server has files, a Delta table, foreign files and folders that are columns."""
    folder = tmp_path / "runs"
    (folder / "study=ext").mkdir(parents=True)
    write(folder / "study=ext" / "1.parquet", FIRST.drop_columns(["study"]))
    write_as(folder / "study=ext" / "2.csv.gz", SECOND.drop_columns(["study"]))
    write_as(folder / "whole.stream", LOG)
    (folder / "README.txt").write_text("notes")
    delta_table(folder / "table")
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        filesystem, path = filesystem_of(f"{server.url}/runs")
        pa.fs.copy_files(str(folder), path, destination_filesystem=filesystem)
        report = take(tmp_path, f"{server.url}/runs")
        assert (report.findings, report.files, report.taken.units, report.present.units) == ([], 4, 8, 16)
        assert report.remarks == [f"passed over {server.url}/runs/README.txt: " + report.remarks[0].split(": ")[-1]]
        assert holds(tmp_path)
        for url, units in {
            "runs/table": 8,
            "runs/whole.stream": 8,
            "runs/study=*/*": 8,
            "runs/*[x]t/?.csv.gz": 4,
            "runs/**/*.gz": 4,
        }.items():
            report = take(tmp_path, f"{server.url}/{url}")
            assert (report.findings, report.present.units) == ([], units)
        assert take(tmp_path, server.url).files == 4, "a whole bucket"
        (finding,) = take(tmp_path, f"{server.url}/none.parquet").findings
        assert finding.text == f"{server.url}/none.parquet: no such file"
        assert "no file matches" in refused(take, tmp_path, f"{server.url}/none/*.parquet")
        inside = f"{server.url}/runs/table/*.parquet"
        assert "part of the Delta table" in refused(take, tmp_path, inside)
        report = ingest_pieces(tmp_path / "other", [f"{server.url}/runs"], documents_csv(tmp_path), H)
        assert (report.findings, report.taken.units) == ([], 8)
    assert take(tmp_path, f"file://{folder}/whole.stream").present.units == 8
    assert "not a URL that can be read" in refused(take, tmp_path, "nothing://x/y.parquet")


# Horizons


def test_the_horizon_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given a horizon, a first file of fewer positions does not decide it."""
    short, whole = write(tmp_path / "short.parquet", LOG.filter(pc.less(LOG["t"], 6))), write(tmp_path / "w", LOG)
    options = ("--store", tmp_path / "store", "--documents", documents_csv(tmp_path))
    code, out, err = command(capsys, short, *options, "--horizon", H)
    assert (code, "horizon:" in out) == (2, False)
    assert f"the replicate ends at 5, but the study and model have horizon {H}" in err
    code, out, _ = command(capsys, whole, *options, "--horizon", H)
    assert (code, f"horizon:       {H} (ext, org/m), as given" in out.splitlines()) == (0, True)
    code, out, _ = command(capsys, whole, *options)
    assert (code, f"horizon:       {H} (ext, org/m), from the store" in out.splitlines()) == (0, True)
    for more in ((), ("--pieces",)):
        code, out, err = command(capsys, whole, *options, "--horizon", "5", *more)
        assert (code, err) == (
            2, f"kvdrift: {whole}: study=ext, model=org/m: the horizon given is 5, but the store has {H}; give {H} or none\n",
        )  # fmt: skip
        assert f"kept out:      0 units, {LOG.num_rows} events" in out
    assert holds(tmp_path)


# Files that are still written


def test_a_format_without_an_end_is_taken_once_it_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "drop" / "log.csv"
    path.parent.mkdir()
    content = write_as(tmp_path / "whole.csv", LOG).read_bytes()
    path.write_bytes(content[:9000])
    taken: list[str] = []

    def wait() -> Iterator[bool]:
        yield True
        assert taken == [], "it is still written"
        path.write_bytes(content)
        yield True
        assert taken == []
        os.utime(path, (quiet := time.time() - 2 * SETTLED_SECONDS, quiet))
        yield True
        yield False

    waits = wait()
    ingest_pieces(tmp_path / "store", [path.parent], documents_csv(tmp_path), H,
                  taken=lambda name, _: taken.append(name), wait=lambda: next(waits))  # fmt: skip
    assert taken == [str(path)]
    assert holds(tmp_path)
