"""Presses that are selectors, too: both ways keep the same entries, and their mismatch agrees within sampling error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.engine_study import study_text
from fixtures.presses import DRAWING, WRAPPED
from fixtures.study_files import load_study

from kvdrift.generator.actions import build_actions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.engines.transformers.engine import Transformers
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.generation.model import Model
from kvdrift.generator.selectors import build_selector
from kvdrift.generator.selectors.kvpress import PRESSES
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.study import Study

pytestmark = pytest.mark.kvpress
CHUNKED = {"ChunkPress", "ChunkKVPress", "EntropyGatedChunkKVPress", "BlockPress"}  # filled up to m as selectors
KEPT = 77  # of 192
PROMPT = make_document("needle", 192, 0, 3).tokens


@pytest.mark.parametrize("name", sorted(set(PRESSES) - DRAWING - CHUNKED - {"PyramidKVPress"}))
def test_both_ways_keep_the_same_entries(name: str) -> None:
    """Pyramids round their budgets, and are compared with kvpress' own by the selectors' tests."""
    windowed = {"window_size": 32} if "SnapKV" in WRAPPED.get(name, "") or name == "SnapKVPress" else {}
    selector = build_selector(f"kvpress:{name}", windowed)
    ours = evict(Prompt(load_model("kvdrift/tiny"), PROMPT, 1, selector.statistics).layers, selector, KEPT)
    ratio = 1 - (KEPT + 0.5) / len(PROMPT)
    settings: dict[str, Any] = {"attention": "eager" if PRESSES[name].attention else "sdpa"}
    inner = PRESSES[name].press
    options = f"compression_ratio={ratio}" + (", window_size=32" if windowed else "")
    settings["press"] = f"{name}({options})" if inner is None else f"{name}({inner}({options}))"
    session = Transformers().side("kvdrift/tiny", settings, name).open(Room(len(PROMPT), 1, 1))
    session.prefill(PROMPT)
    kept = session.kept()
    assert kept is not None
    counts = [np.bincount(index.numpy().ravel(), minlength=len(PROMPT)) for index in ours.indices]
    np.testing.assert_array_equal(kept.counts, counts)


WAYS = {
    "selector": ("", 'selector = "kvpress:SnapKVPress"\nkeep = "1/2"\nwindow_size = 32'),
    "engine": (
        'engine = "transformers"',
        'settings = { press = "SnapKVPress(compression_ratio=0.49869791666666664, window_size=32)" }',  # keeps 192
    ),
}


def study_of(way: str, folder: Path) -> Study:
    engine, half = WAYS[way]
    path = folder / f"{way}.toml"
    path.write_text(study_text("both", f'id = "kvdrift/tiny"\n{engine}', half, of="half"))
    return load_study(path)


@pytest.mark.slow
def test_mismatch_agrees_within_sampling_error(tmp_path: Path) -> None:
    """24 documents, 16 replicates: the mean difference of R is within 4 of its standard errors (p < 1e-4 by chance).

    Both draw the same uniform numbers, so most pairs are equal, token for token.
    """
    differences = []
    models: dict[str, Model] = {
        "selector": load_model("kvdrift/tiny"),
        "engine": engine_model(study_of("engine", tmp_path)),
    }
    for number in range(24):
        document, rates = make_document("needle", 384, number, 3), {}
        for way, model in models.items():
            action = next(one for one in build_actions(study_of(way, tmp_path)) if one.name == "half")
            (unit,) = generate_units(model, "both", document, [PendingUnit(action, 0, 16)], 32, 7)
            rates[way] = np.mean(np.array(unit.events["x_token"]) != np.array(unit.events["y_token"]))
        differences.append(rates["selector"] - rates["engine"])
    error = np.std(differences, ddof=1) / np.sqrt(len(differences))
    assert abs(np.mean(differences)) <= 4 * error
    assert error < 0.02
