"""Tables of finite-state systems: valid systems, the file that holds them, and error lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.refusals import refused

from kvdrift.generator.finite.enumeration import exact_rows
from kvdrift.generator.finite.study_systems import read_system_file
from kvdrift.generator.finite.system import FiniteSystem

HALF = np.array([[0.5, 0.5]])


def coins() -> dict[str, Any]:
    """A valid file's content."""
    fair = {"": [0.5, 0.5], "0": [0.5, 0.5], "1": [0.5, 0.5]}
    coin = {
        "alphabet": 2, "horizon": 2, "eos": [1], "reference": fair,
        "actions": {"tilted": {"": [0.25, 0.75], "0": [1, 0]}},
    }  # fmt: skip
    return {"systems": {"coin": coin}}


def written(folder: Path, content: Any) -> Path:
    file = folder / "systems.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("fields", "where", "value"),
    [
        ({"alphabet": 1}, "", "alphabet .* 1"),
        ({"horizon": 0}, "", "horizon .* 0"),
        ({"horizon": 10**9}, "", "2 .* 1000000000 .* 4194304"),
        ({"actions": {}}, "", "no action"),
        ({"eos_tokens": (2,)}, "", "EOS token 2 "),
        ({"eos_tokens": (1, 0, 1)}, "", "EOS token 1 "),
        ({"horizon": 2}, ", reference", "1 position.* 2"),
        ({"reference": (HALF[:, :1],)}, ", reference, position 1", r"\[1, 1\], .* \[1, 2\]"),
        ({"reference": (HALF.astype(np.float32),)}, ", reference, position 1", "float32 .* float64"),
        ({"actions": {"a": (HALF * 0.5,)}}, ", action 'a', position 1, history []", r"0\.5, .*1e-12"),
        ({"actions": {"a": (HALF * [[3, -1]],)}}, ", action 'a', position 1, history []", r"token 1 .* -0\.5"),
        ({"actions": {"a": (HALF * np.nan,)}}, ", action 'a', position 1, history []", "token 0 .* nan"),
        ({"horizon": 2, "reference": (HALF, np.array([[1.0, 0.0], [1.0, 0.1]]))}, ", reference, position 2, history [1]", r"1\.1"),
    ],
)  # fmt: skip
def test_what_is_no_system(fields: dict[str, Any], where: str, value: str) -> None:
    valid = {"name": "s", "alphabet": 2, "horizon": 1, "reference": (HALF,), "actions": {"a": (HALF,)}}
    FiniteSystem(**valid)
    assert re.match(f"system 's'{re.escape(where)}: .*{value}", refused(FiniteSystem, **{**valid, **fields}))


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    """Integers count as numbers, and distributions after EOS may be left out."""
    (system,) = read_system_file(written(tmp_path, coins())).values()
    assert system.eos_tokens == (1,)
    assert system.distributions("tilted")[1].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert {row["quantity"]: row["value"] for row in exact_rows(system, "tilted")}["divergence_probability"] == 0.375


def edited(*path: str | int, value: Any = None, remove: bool = False) -> Callable[[], dict[str, Any]]:
    """The valid content with one entry of the coin's set or removed."""

    def content() -> dict[str, Any]:
        whole = coins()
        place = whole["systems"]["coin"]
        for key in path[:-1]:
            place = place[key]
        if remove:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return whole

    return content


COIN, PLACE = "system 'coin'", "/systems/coin"
TILTED = f"{COIN}, action 'tilted'"


@pytest.mark.parametrize(
    ("content", "where", "value"),
    [
        (lambda: "{", "cannot be read as JSON", "line 1 column 2"),
        (lambda: '{"systems": {"a": {}, "a": {}}}', "'a'", "twice"),
        (list, " = []", "dictionary"),
        (lambda: {"systems": {}}, "/systems = {}", "at least 1"),
        (lambda: {"systems": {"coin": 3}}, f"{PLACE} = 3", "dictionary"),
        (edited("horizons", value=2), f"{PLACE}/horizons", "'horizon'?"),
        (edited("reference", remove=True), f"{PLACE}/reference", "required"),
        (edited("alphabet", value=2.0), f"{PLACE}/alphabet = 2.0", "integer"),
        (edited("horizon", value=True), f"{PLACE}/horizon = True", "integer"),
        (edited("eos", value=["1"]), f"{PLACE}/eos/0 = '1'", "integer"),
        (edited("eos", value=[2]), COIN, "EOS token 2"),
        (edited("actions", "tilted", value=None), f"{PLACE}/actions/tilted = None", "dictionary"),
        (edited("actions", "tilted", "0", remove=True), f"{TILTED}, position 2, history [0]", '"0"'),
        (edited("reference", "", remove=True), f"{COIN}, reference, position 1, history []", '""'),
        (edited("reference", "0 1", value=[1, 0]), f"{COIN}, reference", '"0 1"'),
        (edited("reference", "1", value=[1]), f"{COIN}, reference, position 2, history [1]", "1 probabilities, not 2"),
        (edited("reference", "1", value="1" * 99), f"{PLACE}/reference/1 = '111", "list"),
        (edited("reference", "1", value=[False, 1]), f"{PLACE}/reference/1/0 = False", "number"),
        (edited("reference", "1", value=[1.5, -0.5]), f"{COIN}, reference, position 2, history [1]", "token 1 has probability -0.5"),
        (edited("reference", "1", value=[10**400, 0]), f"{PLACE}/reference/1/0 = 1000", "number"),
        (lambda: json.dumps(coins()).replace("0.25", "NaN"), f"{TILTED}, position 1, history []", "nan"),
        (edited("horizon", value=23), COIN, "4194304"),
    ],
)  # fmt: skip
def test_error_lines(tmp_path: Path, content: Callable[[], Any], where: str, value: str) -> None:
    file = written(tmp_path, content())
    line = refused(read_system_file, file)
    assert line.startswith(f"{file}: {where}")
    assert value in line.removeprefix(f"{file}: {where}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert refused(read_system_file, missing).startswith(f"{missing}: cannot be read")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    assert refused(read_system_file, binary).startswith(f"{binary}: cannot be read as JSON: 'utf-8'")
