"""An engine is one class and one line of registration: no file, no tokenizer and no setting is asked of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fixtures.small_study import evaluate, run_of
from fixtures.study_files import load_study
from numpy.typing import NDArray

import kvdrift
from kvdrift.generator.engines import registry
from kvdrift.generator.engines.engine import Capabilities, Engine, Room, Session, SideFacts
from kvdrift.schema.errors import InputError

VOCABULARY = 256  # of the embedded source's documents
STUDY = """
study = { name = "bigrams", horizon = 4, seed = 3 }
model = { engine = "bigram", id = "seed:7" }
plan = { baseline = "same", primary = ["mismatch"], replicates = 4, documents = 2, development_replicates = 2, draws = 100 }

[[documents]]
source = "embedded"
tasks = ["needle"]
length = 384
stratum = "needle"
development = 2
evaluation = 2

[[actions]]
name = "same"
weights = "seed:7"

[[actions]]
name = "other"
weights = "seed:8"
"""


class Bigram(Engine):
    """Weights are ``seed:NUMBER``: a table of logits, [V, V], by the last token."""

    fewer_bits: ClassVar[Mapping[str, Any]] = {}
    of_cache = ()

    def description(self) -> Mapping[str, Any]:
        return {"engine": "bigram"}

    def location(self, written: str, _: Path | None, key: str) -> str:
        if not written.removeprefix("seed:").isdigit():
            raise InputError(f"{key}'{written}': write seed:7, say")
        return written

    def side(self, location: str, settings: Mapping[str, Any], _: str, __: Path | None = None) -> BigramSide:
        return BigramSide(location, dict(settings))


@dataclass(frozen=True)
class BigramSide:
    """One table."""

    location: str
    requested: dict[str, Any]
    facts: ClassVar = SideFacts(VOCABULARY, 4096, (2,), None)
    reported: ClassVar[Mapping[str, Any]] = {}
    code: ClassVar[Mapping[str, str]] = {}
    capabilities: ClassVar = Capabilities(row_invariant=True, most_streams=64)

    @property
    def weights_sha256(self) -> str:
        return hashlib.sha256(self.location.encode()).hexdigest()

    def load(self) -> str:
        return ""

    def open(self, room: Room) -> BigramSession:  # noqa: ARG002
        seed = int(self.location.removeprefix("seed:"))
        return BigramSession(np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32))

    def cache_bytes(self, room: Room) -> int:
        return room.entries

    def weight_bytes(self) -> int:
        return 4 * VOCABULARY**2


@dataclass
class BigramSession(Session):
    """The last token of each stream; stream 0 is the prompt."""

    table: NDArray[np.float32]
    last: dict[int, int] = field(default_factory=dict)
    read_back: ClassVar[Mapping[str, Any]] = {}

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.last = {0: tokens[-1]}
        return self.table[tokens[-1]]

    def fork(self, stream: int | None = None) -> int:
        new = max(self.last) + 1
        self.last[new] = self.last[stream or 0]
        return new

    def drop(self, stream: int) -> None:
        del self.last[stream]

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        self.last |= dict(zip(streams, tokens, strict=True))
        return self.table[list(tokens)]


def test_a_study_runs_on_an_engine_that_one_line_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "bigram", Bigram)
    (tmp_path / "study.toml").write_text(STUDY)
    evaluate(run_of(load_study(tmp_path / "study.toml"), tmp_path / "store"))
    with kvdrift.open(tmp_path / "store") as views:
        distances = views.sql(
            "select action, max(delta), max(f), sum((x_token != y_token)::int) from events group by 1 order by 1"
        ).fetchall()
        engines = views.sql("select distinct engine from units").fetchall()
    table = {action: values for action, *values in distances}
    assert table["same"] == table["floor"] == [0, 0, 0]
    assert min(table["other"]) > 0
    assert all('"engine": "bigram"' in engine for (engine,) in engines)


@pytest.mark.parametrize(
    ("change", "key"),
    [(('id = "seed:7"', 'id = "x"'), "model.id = "), (('"seed:8"', '"x"'), "action 'other': weights = ")],
)
def test_an_adapter_says_what_id_and_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], key: str
) -> None:
    monkeypatch.setitem(registry.ENGINES, "bigram", Bigram)
    (tmp_path / "study.toml").write_text(STUDY.replace(*change))
    with pytest.raises(InputError, match=f"^{key}'x'"):
        kvdrift.run(tmp_path / "study.toml", tmp_path / "store")
