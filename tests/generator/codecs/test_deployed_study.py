"""``studies/deployed.toml`` on the embedded model: every cache that it compares, and the bits of its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.house import ROOT

from kvdrift.generator.actions import Action, build_actions
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.schema.study import load_studies

# Bits of a number in a coded layer whose heads have 32 channels. A scale of a whole layer is not counted.
BITS = {
    "fp8": 8, "fp8-e5m2": 8, "fp8-scaled": 8, "nvfp4": 4.5, "q8_0": 8.5, "q8_0-q4_0": 6.5, "q5_1": 6, "q4_0": 4.5,
    "turboquant-k8v4": (8 + 5) / 2, "turboquant-4bit": (4.5 + 5) / 2, "turboquant-k3v4": (3.5 + 5) / 2,
    "turboquant-3bit": (3.5 + 4) / 2, "noise-floor": 32, "full": 32,
}  # fmt: skip


def test_each_cache_runs_in_the_bytes_of_its_format(tmp_path: Path) -> None:
    """The embedded model has three layers, of which TurboQuant's presets code the second, and heads of 32 channels.

    llama.cpp does not rotate such heads.
    """
    text = (ROOT / "studies" / "deployed.toml").read_text("utf-8").replace("kvdrift/smollm2", EMBEDDED_ID)
    (tmp_path / "tiny.toml").write_text(text.replace(", rotated = true", ""))
    (study,) = load_studies(tmp_path / "tiny.toml")
    actions, model, document = build_actions(study), load_model(EMBEDDED_ID), make_document("needle", 384, 0, 7)
    units = generate_units(model, "s", document, [PendingUnit(action, 0, 1) for action in actions], 4, 7)
    assert {action.name for action in actions} == set(BITS)
    for action, unit in zip(actions, units, strict=True):
        bits = [BITS[action.name] if coded else 32 for coded in coded_layers(action)]
        numbers = document.prompt_tokens * model.shape.entry_bytes // 4 // len(bits)
        stored = unit.record["payload_bytes"] + unit.record["scale_bytes"]
        assert 8 * stored / numbers == pytest.approx(sum(bits), abs=0.01), action.name  # scales of whole layers


def coded_layers(action: Action) -> list[bool]:
    presets = str(action.codec_name).startswith("turboquant")
    return [number == 1 or not presets for number in range(3)]
