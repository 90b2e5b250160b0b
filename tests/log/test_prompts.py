"""Prompts and their kept entries are written once, with the units or before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.stored_units import make_unit

from log.prompts import MOST_COUNTS, KeptEntries, kept_entries, layer_groups
from log.store import Store


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
