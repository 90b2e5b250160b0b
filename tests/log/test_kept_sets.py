"""Units of a document keep the entries that stored units keep; prompts and kept entries are written once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.refusals import refused
from fixtures.stored_units import make_unit

from kvdrift.log.prompts import MOST_COUNTS, KeptEntries, kept_entries, layer_groups
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.conditions import unlike_units
from kvdrift.schema.errors import UnlikeUnitsError

KEPT, OTHERS = ["ab" * 32, "cd" * 32], ["ab" * 32, "ef" * 32]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "store")
    made.append_units([make_unit(kept_sha256=KEPT, read_checksums=["1" * 16] * 2)])
    return made


@pytest.mark.parametrize(
    ("units", "parts"),
    [
        ([make_unit("d1"), make_unit(first=4, kept_sha256=OTHERS)],
         ("action 'snapkv'", "document 'd0' of study 's'", "[0, 4) and [4, 8) keep", "--redo snapkv",
          "layer 1: kept_sha256 cdcdcdcdcdcd and efefefefefef")),
        ([make_unit("d1", kept_sha256=KEPT), make_unit("d1", first=4, kept_sha256=OTHERS)], ("document 'd1'",)),
        ([make_unit(first=4, kept_sha256=KEPT, read_checksums=["1" * 16, "2" * 16])],
         ("[0, 4) and [4, 8) read", "layer 1: read_checksums 111111111111 and 222222222222")),
        ([make_unit(first=4, kept_sha256=KEPT[:1])], ("layer 1: kept_sha256 cdcdcdcdcdcd and none",)),
    ],
)  # fmt: skip
def test_units_that_keep_or_read_other_entries_are_refused_and_nothing_is_stored(
    store: Store, units: list[Unit], parts: tuple[str, ...]
) -> None:
    before = store.versions()
    for writer in (store, Store.open(store.location)):
        line = refused(writer.append_units, units, error=UnlikeUnitsError)
        assert all(part in line for part in parts), line
    assert store.versions() == before


@pytest.mark.parametrize(
    "changed",
    [
        {"first": 4, "kept_sha256": None},  # unknown, as of another generator
        {"first": 4, "kept_sha256": KEPT, "read_checksums": None},
        {"first": 4, "kept_sha256": KEPT, "read_checksums": ["1" * 16] * 2},
        {"doc": "d1", "kept_sha256": OTHERS},
        {"action": "recent", "kept_sha256": OTHERS},
        {"kept_sha256": OTHERS, "action_revision": 1},
    ],
)
def test_other_units_are_taken(store: Store, changed: dict[str, Any]) -> None:
    assert store.append_units([make_unit(**changed)]) == 1
    assert list(unlike_units(store.read("units").to_pylist())) == []


def prompt_row(doc: str = "d0", **changed: Any) -> dict[str, Any]:
    own = {"study": "s", "model": "m", "doc": doc, "document_revision": 0, "action": None, "action_revision": 0}
    rest = {"step": 0, "tokens": [1, 2, 3], "records": None, "layers": None, "pairs": None, "kept": None}
    return own | rest | changed


def test_rows_are_written_once(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    assert store.append_prompts([prompt_row(), prompt_row("d1")]) == 2
    assert store.append_prompts([prompt_row(tokens=[9])]) == 0, "the key is there, whatever the row says"
    assert Store.open(tmp_path / "store").append_prompts([prompt_row("d1"), prompt_row("d2")]) == 1
    rows = store.read("prompts").sort_by("doc").to_pylist()
    assert [(row["doc"], row["tokens"]) for row in rows] == [(f"d{at}", [1, 2, 3]) for at in range(3)]
    assert store.prompts_of("s", "m") == {("d0", 0), ("d1", 0), ("d2", 0)}
    assert store.prompts_of("other", "m") == set()


def test_units_come_with_what_they_keep(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    kept = (KeptEntries(2, 4, np.array([[1, 0, 2]], np.int32)), KeptEntries(2, 8, np.array([[1, 0, 0]], np.int32), 5))
    unit = replace(make_unit(), kept=kept)
    assert store.append_units([unit, replace(make_unit(first=4), kept=kept)]) == 2
    assert store.append_units([unit]) == 0
    rows = store.read("prompts").sort_by("step").to_pylist()
    assert [(row["action"], row["step"], row["pairs"], row["kept"]) for row in rows] == [
        ("snapkv", 0, 4, [1, 0, 2]),
        ("snapkv", 5, 8, [1, 0, 0]),
    ]


@pytest.mark.parametrize(("layers", "entries", "groups"), [(3, 396, 3), (32, 8192, 32), (32, 32768, 8), (2, 2**20, 1)])
def test_layers_are_counted_in_few_groups(layers: int, entries: int, groups: int) -> None:
    assert layer_groups(layers, entries) == groups
    assert groups == 1 or groups * entries <= MOST_COUNTS


def test_groups_add_up() -> None:
    random = np.random.default_rng(1)
    of_layer = [random.integers(0, 5, 40_000) for _ in range(7)]
    kept = kept_entries(of_layer, 28, step=3)
    assert (kept.layers, kept.pairs, kept.step, kept.counts.shape) == (7, 28, 3, (6, 40_000))
    assert (kept.counts.sum(0) == np.sum(of_layer, axis=0)).all()
    bounds = [group * 7 // 6 for group in range(7)]
    for group, counts in enumerate(kept.counts):
        assert (counts == np.sum(of_layer[bounds[group] : bounds[group + 1]], axis=0)).all()
