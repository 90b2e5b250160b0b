"""The forecast of memory against what a process takes: models with experts, windows and states, and two models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fixtures.families import FAMILIES
from fixtures.house import ROOT

from kvdrift.generator.transformer.files.configuration import quiet
from kvdrift.generator.transformer.footprint import local_footprint, plan_memory
from kvdrift.schema.own_process import own_environment
from kvdrift.schema.tables import PLAIN

ENTRIES, KEPT, REPLICATES, CONTROLS, HORIZON = 1500, 750, 32, 2, 64

# 8 layers of width 512. How the layers of each family differ is as in the matrix of families, for twice as many.
_LARGE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 5, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen3-moe": {"num_experts": 8, "moe_intermediate_size": 512},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 512},
    "gpt-oss": {
        "num_local_experts": 8, "intermediate_size": 512, "sliding_window": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "gemma3": {"sliding_window": 256, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
    "qwen3.5": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "falcon-h1": {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
}  # fmt: skip

# A first document leaves what libraries keep for themselves; then whole steps are tried again, as for a first document.
_PROGRAM = """
import ctypes, gc, json, sys
from dataclasses import replace
from pathlib import Path
import torch
from fixtures.common_actions import CONTROL, HALF_RECENT
from kvdrift.generator.checks.random_models import random_document
from kvdrift.generator.attention.row_invariance import TriedSteps
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.other_weights.model import ModelWithOthers

def resident(what):
    return 1024 * int(Path("/proc/self/status").read_text().partition(what + ":")[2].split()[0])

folders, entries, replicates, controls, horizon = json.loads(sys.argv[1])
torch.set_num_threads(1)
knorm = replace(HALF_RECENT, name="other-half")
networks = [load_model(folder) for folder in folders]

def generate(count, steps):
    networks[:] = [replace(network, steps=TriedSteps()) for network in networks]
    reference, *others = networks
    model = ModelWithOthers.of(reference, {knorm.name: others[0]}) if others else reference
    pending = [PendingUnit(action, 0, count) for action in (HALF_RECENT, knorm)]
    pending.append(PendingUnit(CONTROL, 0, min(count, controls)))
    generate_units(model, "s", random_document("d", entries), pending, steps, 3)

generate(1, 4)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
generate(replicates, horizon)
print(resident("VmHWM") - before)
"""


def saved(folder: Path, family: str, seed: int = 0) -> str:
    """A random model of a family in a folder."""
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    torch.manual_seed(seed)
    with quiet():
        model = getattr(transformers, f"{kind}ForCausalLM")(config(**_LARGE | changes | _CHANGES[family]))
        model.save_pretrained(folder)
    return str(folder)


def printed(program: str, folders: list[str], home: Path) -> Any:
    """The JSON that a program prints, which runs in a process of its own on the models in ``folders``."""
    given = json.dumps([folders, ENTRIES, REPLICATES, CONTROLS, HORIZON])
    ended = subprocess.run(
        [sys.executable, "-c", program, given],
        env=own_environment() | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(ended.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read as Linux tells it")
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss", "gemma3", "qwen3.5", "falcon-h1", "two models"])
def test_memory_is_forecast_within_a_fifth(family: str, tmp_path: Path) -> None:
    """A process's resident memory at most, beyond that of the loaded model, for the first document of its size."""
    kinds = ["mistral"] * 2 if family == "two models" else [family]
    folders = [saved(tmp_path / str(number), kind, number) for number, kind in enumerate(kinds)]
    peak = printed(_PROGRAM, folders, tmp_path)
    shapes = [found.shape for folder in folders if (found := local_footprint(folder, "float32")) is not None]
    kept, replicates = [KEPT, KEPT, 0], [REPLICATES, REPLICATES, CONTROLS]
    sides = [(shapes[0], kept, replicates)]
    if len(shapes) > 1:
        sides = [(shapes[0], kept[1:], replicates[1:]), (shapes[1], kept[:1], replicates[:1])]
    plan = plan_memory(sides, ENTRIES, HORIZON, sys.maxsize, PLAIN, packed=True)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.2)


# A first document, as above; then the peak and the resident memory after another one, beyond those before.
_GIVEN_BACK = (
    _PROGRAM.partition("generate(1, 4)")[0]
    + """
from kvdrift.generator.generation import generate_documents

def generate_one(doc):
    work = [(random_document(doc, entries), [PendingUnit(HALF_RECENT, 0, replicates)])]
    list(generate_documents(networks[0], "s", work, horizon, 3))

generate_one("first")
ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
generate_one("second")
print(json.dumps([resident("VmHWM") - before, resident("VmRSS") - before]))
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read as Linux tells it")
def test_memory_of_a_document_is_given_back(tmp_path: Path) -> None:
    """Of a document's memory the allocator would keep half, in pieces too small for a longer document's tensors."""
    peak, kept = printed(_GIVEN_BACK, [saved(tmp_path / "model", "mistral")], tmp_path)
    assert kept < 0.2 * peak
