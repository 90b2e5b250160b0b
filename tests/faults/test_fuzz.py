"""Fuzz: files of arbitrary content, and names that could lead out of folders or break documents, are read or refused."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from faults.outcomes import SURVIVED, tell
from fixtures.command import call
from fixtures.event_logs import documents_csv, make_log, write, write_as
from fixtures.small_study import write_study
from fixtures.table_systems import table_system
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvdrift.generator.checks.random_models import ARCHITECTURES, save_random_model
from kvdrift.generator.documents.files import read_object, read_rows
from kvdrift.generator.finite.study_systems import read_system_file
from kvdrift.generator.transformer.files.configuration import head_size, position_limit, vocabulary_size
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.model_checks import check_model
from kvdrift.ingestion.files import EventFile
from kvdrift.ingestion.records import read_documents, read_facts_file
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import load_studies

# --- content of the user's files -----------------------------------------------------------------------------------------

LONGEST = 2_100  # characters of a line


def read_events(path: Path) -> None:
    """Read events as ``kvdrift ingest`` does, without the checks of their values."""
    log = EventFile(path)
    for _ in log.portions(log.groups()):
        pass


def read_model(path: Path) -> None:
    """Read a model's files as a run does before it loads a weight."""
    folder = str(path.parent)
    check_model(folder, dtype="float32", revision=None)
    for number in (position_limit, vocabulary_size, head_size):
        number(folder)


@dataclass(frozen=True)
class Reader:
    """A file's name and its reader."""

    name: str
    read: Callable[[Path], object]

    def says(self, path: Path) -> str | None:
        """Read a file; return the line of the error, if there is one."""
        try:
            self.read(path)
        except InputError as error:
            line = str(error)
            assert line.startswith((str(path), f"model.id = '{path.parent}'")), line
            assert "\n" not in line
            assert len(line) < LONGEST
            return line
        return None


READERS = [
    Reader("study.toml", load_studies),
    Reader("prompts.jsonl", lambda path: list(read_rows(path))),
    Reader("prompts.json", lambda path: list(read_rows(path))),
    Reader("exclude.json", read_object),
    Reader("tables.json", read_system_file),
    Reader("documents.csv", read_documents),
    Reader("documents.jsonl", read_documents),
    Reader("documents.parquet", read_documents),
    Reader("facts.csv", read_facts_file),
    Reader("facts.jsonl", read_facts_file),
    Reader("events.parquet", read_events),
    Reader("events.arrow", read_events),
    Reader("events.stream", read_events),
    Reader("events.csv", read_events),
    Reader("events.csv.gz", read_events),
    Reader("events.jsonl", read_events),
    Reader("events.jsonl.zst", read_events),
    Reader("config.json", read_model),
    Reader("generation_config.json", read_model),
    Reader("model.safetensors", read_model),
    Reader("pytorch_model.bin", lambda path: load_model(str(path.parent))),
]
NAMES = [reader.name for reader in READERS]
MODEL = ("config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid file of each name, and a folder ``model`` with a whole model."""
    folder = tmp_path_factory.mktemp("right")
    write_study(folder)
    (folder / "study.toml").write_bytes(next(folder.glob("*.toml")).read_bytes())
    rows = [{"id": f"d{number}", "prompt": "some text", "answers": ["a"]} for number in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.json").write_text(json.dumps(rows))
    (folder / "exclude.json").write_text(json.dumps({"clusters": ["a", "b"]}))
    (folder / "tables.json").write_text(json.dumps({"systems": {"coin": table_system(2, 0.5, {"tilted": 0.25})}}))
    documents = pa.csv.read_csv(documents_csv(folder))
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents.to_pylist()))
    pq.write_table(documents, folder / "documents.parquet")
    (folder / "facts.csv").write_text('action,payload_bytes,engine\nhalf,52,"{""engine"": ""mine""}"\n')
    (folder / "facts.jsonl").write_text('{"action": "half", "payload_bytes": 52, "engine": {"engine": "mine"}}\n')
    log = make_log()
    pq.write_table(log, folder / "events.parquet")
    with pa.ipc.new_file(folder / "events.arrow", log.schema) as writer:
        writer.write_table(log)
    for name in ("events.stream", "events.csv", "events.csv.gz", "events.jsonl", "events.jsonl.zst"):
        write_as(folder / name, log)
    save_random_model(folder / "model", next(iter(ARCHITECTURES)))
    torch.save(load_file(folder / "model" / "model.safetensors"), folder / "model" / "pytorch_model.bin")
    for name in MODEL:
        shutil.copy(folder / "model" / name, folder / name)
    return folder


def place_of(reader: Reader, right: Path, folder: Path) -> Path:
    """Return the path at which the reader finds its file in a folder, beside everything else that it needs."""
    if reader.name in MODEL:
        weights = "pytorch_model.bin" if reader.name == "pytorch_model.bin" else "model.safetensors"
        for name in ("config.json", "generation_config.json", weights):
            shutil.copy(right / name, folder / name)
    return folder / reader.name


NASTY = {
    "nested": lambda text: b"[" * 100_000 + text,
    "nested tables": lambda text: b'{"a":' * 100_000 + text,
    "a number of many digits": lambda text: text.replace(b"2", b"9" * 5_000, 1),
    "not UTF-8": lambda text: text[:-3] + b"\xff\xfe" + text[-3:],
    "cut": lambda text: text[: len(text) // 2],
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_a_right_file_is_read(reader: Reader, right: Path, tmp_path: Path) -> None:
    path = place_of(reader, right, tmp_path)
    shutil.copy(right / reader.name, path)
    assert reader.says(path) is None


@pytest.mark.parametrize("how", NASTY)
@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_a_nasty_file_is_one_line(reader: Reader, how: str, right: Path, tmp_path: Path) -> None:
    path = place_of(reader, right, tmp_path)
    path.write_bytes(NASTY[how]((right / reader.name).read_bytes()))
    said = reader.says(path)
    if how in {"nested", "nested tables"}:
        assert said is not None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"num_attention_heads": 0},
            "cannot load its configuration: ZeroDivisionError: integer division or modulo by zero",
        ),
        ({"num_attention_heads": "two"}, "cannot load its configuration: "),
        ({"hidden_size": None}, "cannot load its configuration: "),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: at most 10,000 are read"),
        ({"vocab_size": []}, "cannot load its configuration: "),
        ({"rope_parameters": 3}, "cannot load its configuration: "),
        ({"architectures": 7}, "cannot load its configuration: "),
    ],
)
def test_a_configuration_that_makes_no_model(
    right: Path, tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    reader = READERS[NAMES.index("config.json")]
    path = place_of(reader, right, tmp_path)
    content = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "head_dim"}
    path.write_text(json.dumps(content | changes))
    assert (reader.says(path) or "").startswith(f"model.id = '{tmp_path}': {line}")


class Ran:
    """An object in PyTorch's own format that makes a folder if a reader runs the code in the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self._file),)


def test_weights_run_no_code(right: Path, tmp_path: Path) -> None:
    reader = READERS[NAMES.index("pytorch_model.bin")]
    path = place_of(reader, right, tmp_path)
    torch.save({"model.norm.weight": Ran(tmp_path / "ran")}, path)
    line = f"model.id = '{tmp_path}': cannot load its weights: a pickle that is damaged, or that would run code"
    assert reader.says(path) == line
    assert not (tmp_path / "ran").exists()


def test_a_long_value_is_echoed_in_part(tmp_path: Path) -> None:
    path = write_study(tmp_path, ('keep = "1/2"', f'keep = "{"9" * 500_000}%%"'))
    said = READERS[0].says(path)
    assert said is not None
    assert said.startswith(f"{path}: action 'snapkv-half': keep = '999")
    assert said.endswith('999%%\': write an integer, an exact fraction such as "1/2", or "all"')


@dataclass(frozen=True)
class Edit:
    """Bytes that replace other bytes, after a given ``share`` of the file."""

    share: float
    removed: int
    inserted: bytes


FRAGMENTS = [
    b"[", b"{", b'"', b",", b"\n", b"0", b"-1", b"1e999", b"NaN", b"null", b"\x00", b"\xff", b"9" * 5_000, b"/0",
]  # fmt: skip
EDITS = st.lists(
    st.builds(
        Edit,
        st.floats(0, 1),
        st.sampled_from([0, 0, 1, 2, 8, 200]),
        st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=8), st.sampled_from("0123456789").map(str.encode)),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: list[Edit]) -> bytes:
    for edit in edits:
        begin = int(edit.share * len(content))
        content = content[:begin] + edit.inserted + content[begin + edit.removed :]
    return content


@pytest.mark.parametrize("examples", [10, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_an_edited_file_is_read_or_is_one_line(reader: Reader, examples: int, right: Path, tmp_path: Path) -> None:
    path = place_of(reader, right, tmp_path)
    content = (right / reader.name).read_bytes()

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(EDITS)
    def check(edits: list[Edit]) -> None:
        path.write_bytes(edited(content, edits))
        reader.says(path)

    check()


# --- names ---------------------------------------------------------------------------------------------------------------

HOSTILE = (
    "../../../x",
    "..",
    "/etc/x",
    "con\n\x1b[2Jtrol\x00",
    'it\'s "quoted"; drop table events --',
    "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>&amp;",
    "n" * 3000,
    "ехt",
    "ext",
    "{{ 7 * 7 }}%s$t$\\",
    "?x=%41",
)


@pytest.fixture(scope="module", autouse=True)
def unwritten_figures() -> None:
    """Figures of hostile names are written."""


@pytest.mark.slow
def test_from_ingestion_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each name is at once that of a study, a document, an action and a stratum."""
    store, out = tmp_path / "below" / "store", tmp_path / "below" / "out"
    documents = tmp_path / "documents.csv"
    with documents.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["doc", "stratum", "split"])
        rows.writerows([name, name, "evaluation"] for name in (*(n for n in HOSTILE if "\0" not in n), "d0", "d1"))
    logs = []
    for number, name in enumerate(HOSTILE):
        log = make_log([name, "d0", "d1"], ["base", name], range(3), 4, study=name, model=name)
        logs.append(write(tmp_path / f"{number}.parquet", log))
    before = {path for path in tmp_path.rglob("*") if "below" not in path.parts}
    said = [call(capsys, "ingest", *logs, "--store", store, "--documents", documents)]
    said += [call(capsys, "derive", store), call(capsys, "status", store), call(capsys, "verify", store)]
    assert [code for code, _, _ in said] == [2, 0, 0, 0], said  # the name with a zero is in no documents file
    assert set(Store.open(store).units()["study"].to_pylist()) == set(HOSTILE)
    assert call(capsys, "analyze", store)[0] == 0
    for options in ((), ("-o", out)):
        code, listed, err = call(capsys, "report", store, *options)
        assert (code, err[-300:]) == (0, "")
        said.append((code, listed, err))
    for _, printed, err in said:
        assert re.search(r"[\x00-\x08\x0b-\x1f\x7f]", printed + err) is None
    assert {path for path in tmp_path.rglob("*") if "below" not in path.parts} == before
    assert {path.name for path in (tmp_path / "below").iterdir()} == {"store", "out"}
    pages = [*(store / "report").rglob("index.html"), *out.rglob("index.html")]
    assert len(pages) == 2 * len(HOSTILE)
    for page in pages:
        assert "<script>alert" not in page.read_text(encoding="utf-8")
        for figure in page.parent.glob("figures/*.svg"):
            ET.parse(figure)  # noqa: S314 - our own
        for table in page.parent.glob("tables/*.csv"):
            with table.open(newline="", encoding="utf-8") as file:
                cells = {cell for row in csv.reader(file) for cell in row}
            assert not [cell for cell in cells if re.match(r"[=@\t\r]|[+-](?![\d.])", cell)]
    tell(
        "fuzz",
        "a name that leads out of folders, breaks documents, terminals or spreadsheets",
        [SURVIVED] * len(HOSTILE),
    )
