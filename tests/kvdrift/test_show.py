"""``kvdrift show``: a trajectory of the newest revision, as text and as JSON."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.command import call, mistake
from fixtures.stored_units import edit, make_unit

from kvdrift.log.store import Store
from kvdrift.schema.tables import DOCUMENTS, TOKENS
from kvdrift.transforms.pipeline import run_derivation

ENDS = {"x_eos": [False] * 5 + [True] * 3, "y_eos": [False] * 3 + [True] * 5}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Replicate 1 of the newer revision: mismatches at 3, 4 and 5; Y ends at 4, X at 6; the token has a line break."""
    made = Store.create(tmp_path_factory.mktemp("store") / "store")
    unit = make_unit(replicates=2, action_revision=1)
    x, y = [11, 12, 13, 14, 15, 9, 9, 9], [11, 12, 23, 9, 9, 9, 9, 9]
    columns = {"x_token": x, "y_token": y, **ENDS, "delta": [0.0, 0.25] + [0.5] * 4 + [0.0] * 2}
    for column, values in columns.items():
        for t, value in enumerate(values):
            unit = edit(unit, column, 8 + t, value)
    schema = DOCUMENTS.schema
    given = {"study": "s", "model": "org/model", "split": "evaluation", "stratum": "all", "answers": ["w11 w12"]}
    rows = [
        dict.fromkeys(schema.names) | DOCUMENTS.defaults | given | {"doc": doc, "cluster": doc} for doc in ("d0", "d1")
    ]
    made.append_rows("documents", pa.Table.from_pylist(rows, schema=schema))
    made.append_units([make_unit(replicates=2), unit, make_unit("d1", replicates=2)])
    run_derivation(made.location)
    return made.location


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of words, of which 13 is two lines."""
    words = {13: "two\nlines", 14: " spaced", 9: "<eos>"}
    reader = lambda _id, **_: lambda token: words.get(token, f"w{token}")  # noqa: E731 - one expression
    monkeypatch.setattr("kvdrift.generator.transformer.files.tokenizer.token_reader", reader)


def test_positions_are_shown_until_both_have_ended(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "show", store, "d0", "snapkv", "1")
    assert (code, err) == (0, "")
    first, story, answers, _, *rows = out.splitlines()
    assert first == "s, org/model: d0 (evaluation all), snapkv, replicate 1"
    assert answers == "answers: w11 w12"
    assert re.findall(r"\d+", story) == ["8", "3", "3", "6", "4"]
    assert [row.split()[:-1] for row in rows] == [
        ["1", "w11", "w11", "0.0000"],
        ["2", "w12", "w12", "0.2500"],
        ["3", "two\\nlines", "w23", "≠", "τ", "0.5000"],
        ["4", "'", "spaced'", "<eos>", "≠", "0.5000"],
        ["5", "w15", "≠", "0.5000"],
        ["6", "<eos>", "0.5000"],
    ]


def test_json_has_tokens_and_their_text(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "show", store, "d0", "snapkv", "1", "--json")
    shown = json.loads(out)
    assert (shown["tau"], shown["action_revision"], len(shown["positions"])) == (3, 1, 8)
    assert {"t": 3, "x_token": 13, "x_text": "two\nlines", "delta": 0.5}.items() <= shown["positions"][2].items()


def test_without_the_tokenizer_tokens_are_numbers(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvdrift.generator.transformer.files.tokenizer.token_reader", lambda _id, **_: None)
    _, out, _ = call(capsys, "show", store, "d0", "snapkv", "1")
    assert out.splitlines()[6].split()[:3] == ["3", "13", "23"]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (
            [(11, "eleven"), (12, "twelve"), (13, "thirteen"), (15, "fifteen"), (9, "<end>")],
            [["eleven", "eleven"], ["twelve", "twelve"], ["thirteen", "23"], ["14", "<end>"]],
        ),
        (
            [(11, " \\xE9"), (12, "\\x95"), (13, "\\xBF"), (23, "\\x8E\\xE5"), (14, "a\\b\xe9"), (9, "<end>")],
            [["' \\xE9'", "' \\xE9'"], ["\\x95", "\\x95"], ["' 长'", "' 镎\\xE5'"], ["a\\\\bé", "<end>"]],
        ),
    ],
)
def test_the_stores_texts_come_before_the_tokenizers(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: list[tuple[int, str]], shown: list[list[str]]
) -> None:
    """A token without text is a number; a character stands at the last of its tokens, and the others are bytes."""
    copied = Store.open(shutil.copytree(store, tmp_path / "store"))
    rows = [{"study": "s", "model": "org/model", "token": token, "text": text} for token, text in texts]
    copied.append_rows("tokens", pa.Table.from_pylist(rows, schema=TOKENS.schema))
    code, out, err = call(capsys, "show", copied.location, "d0", "snapkv", "1")
    assert (code, err) == (0, "")
    assert [re.split(r"  +", row.strip())[1:3] for row in out.splitlines()[4:8]] == shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("elsewhere", "snapkv"), "d0, d1"),
        (("d0", "snapvk"), "'snapkv'"),
        (("d01", "snapkv"), "'d1'"),
        (("d0", "snapkv", "2"), "REPLICATE 2: "),
        (("d0", "snapkv", "--study", "t"), "--study t: not in "),
    ],
)
def test_what_is_not_there(store: str, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert line in mistake(capsys, "show", store, *arguments)


def test_events_that_are_not_derived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Store.create(tmp_path / "store")
    made.append_units([make_unit()])
    assert "holds no study yet" in mistake(capsys, "show", made.location, "d0", "snapkv")


def test_the_line_that_was_lost_is_printed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the small study: the records that recent entries do not have, each with its place in the prompt."""
    _, out, _ = call(capsys, "show", str(finished), "needle-384-00002", "recent-half", "--json")
    shown = json.loads(out)
    assert len(shown["records"]) == len(shown["answers"]) == 5
    gone = [record for record in shown["records"] if record["kept"] == 0]
    rows = Store.open(finished).read("prompts").to_pylist()
    (prompt,) = [row for row in rows if (row["doc"], row["action"]) == ("needle-384-00002", None)]
    texts = {row["token"]: row["text"] for row in Store.open(finished).read("tokens").to_pylist()}
    assert gone
    _, out, _ = call(capsys, "show", str(finished), "needle-384-00002", "recent-half")
    for record in gone:
        (place,) = record["places"]
        assert f"record of '{record['text']}': is gone\n  at {place['first']}–{place['last']}: … " in out
        stated = prompt["tokens"][place["first"] - 2 : place["last"] + 1]  # REC before it, and what ends it
        assert "".join(map(texts.__getitem__, stated)) in place["line"]
