"""Loading a model: error lines, silence, EOS tokens, and weights that fill the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.common_actions import CONTROL, assert_like_plain, plain_twin
from fixtures.refusals import refused
from oracles.plain_generator import keep_snapkv, load_eager
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, T5Config

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import (
    EOS_TOKENS,
    VOCABULARY,
    random_document,
    save_random_model,
)
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SnapKV
from kvdrift.generator.transformer.files.configuration import head_size, position_limit, read_configuration
from kvdrift.generator.transformer.files.local_folders import has_local_weights, local_configuration
from kvdrift.generator.transformer.files.text_ends import TextEnds, model_ends
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.model_checks import check_model, check_tensors, needed_tensors
from kvdrift.schema.retention import Retention

ROOT = Path(__file__).parents[3]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def error_line(model_id: str, **options: str) -> str:
    return refused(load_model, model_id, **options)


# --- Error lines -----------------------------------------------------------------------------------------------------


def test_no_such_folder(tmp_path: Path) -> None:
    home_of_nobody = "~no-such-user-of-this-machine/model"
    assert not has_local_weights(home_of_nobody)
    for model_id in (str(tmp_path / "nothing"), "./nothing", "~/nothing", "../nothing", home_of_nobody):
        assert error_line(model_id) == f"model.id = '{model_id}': no such folder"


def test_a_folder_under_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` means the same for loading as for configuration, weights and positions before it."""
    monkeypatch.setenv("HOME", str(folder.parent))
    model_id = f"~/{folder.name}"
    assert has_local_weights(model_id)
    assert local_configuration(model_id) == json.loads((folder / "config.json").read_text())
    assert position_limit(model_id) == 2048
    check_model(model_id, dtype="float32", revision=None)
    model = load_model(model_id)
    assert (model.id, model.device, model.dtype, model.eos_tokens) == (model_id, "cpu", "float32", EOS_TOKENS)
    assert token_reader(model_id) is None, "the folder has no tokenizer"


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    places = {"lm_head.weight": "two.safetensors", "model.norm.weight": "one.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    ("damage", "lack"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "weights (*.safetensors), or not all"),
        (lose_a_shard, "weights (*.safetensors), or not all"),
    ],
)
def test_a_folder_without(folder: Path, damage: Callable[[Path], None], lack: str) -> None:
    damage(folder)
    assert error_line(str(folder)) == f"model.id = '{folder}': the folder has no {lack}"


def test_a_served_model_needs_its_configuration_here_and_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check = partial(check_model, str(folder), dtype="float32", revision=None)
    assert "weights" in refused(check)
    assert not check(served=True), "its weights were not checked"
    (folder / "config.json").unlink()
    assert "config.json" in refused(partial(check, served=True))


def test_an_unknown_id() -> None:
    """Not a folder, not in the local cache, and the network is off in tests."""
    assert error_line("nobody/no-such-model").startswith(
        "model.id = 'nobody/no-such-model': cannot load its configuration: "
    )
    for model_id in ("a/b/c", "no such id", "models/x", "datasets/x"):
        assert error_line(model_id).startswith(f"model.id = '{model_id}': no such folder in ")


@pytest.mark.parametrize(
    ("config", "architecture", "message"),
    [
        (MistralConfig(sliding_window=32), "MistralForCausalLM", "sliding-window attention in all layers"),
        (Qwen3Config(use_sliding_window=True, sliding_window=32, max_window_layers=0, num_hidden_layers=2), "Qwen3ForCausalLM", "sliding-window attention in all layers"),
        (Qwen2Config(layer_types=["full_attention", "chunked_attention"], num_hidden_layers=2), "Qwen2ForCausalLM", "attention of type 'chunked_attention'"),
        (MistralConfig(), "LlamaForCausalLM", "architecture LlamaForCausalLM as 'mistral'"),
        (T5Config(), "T5ForConditionalGeneration", "encoder-decoder architecture T5ForConditionalGeneration"),
        (LlamaConfig(), "LlamaForSequenceClassification", "architecture LlamaForSequenceClassification as 'llama'"),
        (LlamaConfig(), None, "architecture unknown as 'llama'"),
    ],
)  # fmt: skip
def test_what_is_not_plain_causal_attention_is_refused_by_name(
    folder: Path, config: Any, architecture: str | None, message: str
) -> None:
    config.architectures = architecture and [architecture]
    config.save_pretrained(folder)
    assert error_line(str(folder)).startswith(f"model.id = '{folder}': {message}")


def test_a_window_that_no_layer_has_is_none(folder: Path) -> None:
    """Published Qwen2.5 configurations have a window beside ``use_sliding_window`` false, or above all layers."""
    for changes in ({"use_sliding_window": False}, {"use_sliding_window": True, "max_window_layers": 2}):
        edit_config(folder, sliding_window=32, layer_types=..., **changes)
        assert load_model(str(folder)).id == str(folder)


def test_a_wrong_configuration(folder: Path) -> None:
    """Code that comes with a model is not run, and nothing is asked."""
    (folder / "own.py").write_text("raise SystemExit('ran')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    for changes in (own, {"model_type": ...}, {"model_type": "no-such-type"}, {"num_attention_heads": "four"}):
        edit_config(folder, **{"model_type": "qwen2", "num_attention_heads": 4} | changes)
        assert error_line(str(folder)).startswith(f"model.id = '{folder}': cannot load its configuration: "), changes
    (folder / "config.json").write_text("{")
    assert error_line(str(folder)).startswith(f"model.id = '{folder}': cannot load its configuration: ")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("dtype", "float23", "'float32'?"), ("dtype", "int8", ""), ("dtype", "", "known: "), ("device", "gpu", ""),
        ("device", "cuda:99", ""), ("device", "meta", ""),
    ],
)  # fmt: skip
def test_an_unknown_dtype_or_device(folder: Path, key: str, value: str, hint: str) -> None:
    line = error_line(str(folder), **{key: value})
    assert line.startswith(f"model.{key} = '{value}': ")
    assert hint in line


def test_a_document_too_long_for_the_model(folder: Path) -> None:
    """Prompt and horizon together may take all positions, and no more."""
    edit_config(folder, max_position_embeddings=100)
    assert position_limit(str(folder)) == 100
    model = load_model(str(folder))
    model.prepare(random_document("fits", 88), [CONTROL], horizon=12)
    line = refused(model.prepare, random_document("long", 89), [CONTROL], horizon=12)
    assert line.startswith("document 'long': ")
    assert [part in line for part in ("89 tokens", "horizon of 12", "100 positions")] == [True] * 3


def test_the_size_of_heads_is_known_without_weights(folder: Path) -> None:
    """The size is stated by the configuration, or follows from the width; missing values are transformers' defaults."""
    assert head_size(str(folder)) == 16
    edit_config(folder, head_dim=24)
    assert head_size(str(folder)) == 24
    edit_config(folder, head_dim=None, num_attention_heads=8)
    assert head_size(str(folder)) == 8
    edit_config(folder, num_attention_heads=...)
    assert head_size(str(folder)) == 64 // LlamaConfig().num_attention_heads


# --- Weights must fill the model -------------------------------------------------------------------------------------


def cut_weights(folder: Path, size: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])


@pytest.mark.parametrize(
    "damage",
    [
        partial(cut_weights, size=0), partial(cut_weights, size=2), partial(cut_weights, size=5000),
        partial(edit_config, quantization_config={"quant_method": "gptq", "bits": 4}),  # needs another package
    ],
)  # fmt: skip
def test_weights_that_cannot_be_loaded(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    assert error_line(str(folder)).startswith(f"model.id = '{folder}': cannot load its weights: ")


@pytest.mark.parametrize(
    ("edit", "tensor"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 64)}), "lm_head.weight"),  # of another size
    ],
)
def test_a_missing_tensor_is_not_filled_with_random_numbers(folder: Path, edit: Any, tensor: str) -> None:
    edit_weights(folder, edit)
    line = error_line(str(folder))
    assert line.startswith(f"model.id = '{folder}': its weights lack 1 tensor(s) ")
    assert line.endswith(f": {tensor}")


def test_tied_embeddings_lack_nothing(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    network = load_model(str(folder)).network
    assert torch.equal(network.lm_head.weight, network.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 32}),
        ("qwen3", {}),
    ],
)
def test_needed_tensors_are_those_of_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Files of the network without its head use other names, and are complete if the head is tied."""
    folder = save_random_model(tmp_path, kind, **changes)
    config = read_configuration(str(folder), None)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert needed_tensors(config) == stored
    assert check_tensors(str(folder), config, None)
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    line = refused(check_tensors, str(folder), config, None)
    assert line == error_line(str(folder))


# --- What comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (list(EOS_TOKENS), 9, (*EOS_TOKENS, 9)),  # the generation configuration's come first, in its order
        ([40, 5], [5, 9], (40, 5, 9)),
        (3, 3, (3,)),
        (0, 9, (0, 9)),  # token 0 is a token
        (None, 9, (9,)),
        (None, None, ()),
        ([VOCABULARY - 1, VOCABULARY, -1], [9, 8], (VOCABULARY - 1, 9, 8)),  # as large as no token is
        (..., 9, (9,)),  # without a generation configuration
    ],
)
def test_eos_tokens(folder: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    edit_config(folder, eos_token_id=config)
    (folder / "generation_config.json").unlink()
    if generation is not ...:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert TextEnds.of(model_ends(str(folder)), VOCABULARY).tokens == expected


@pytest.mark.parametrize(
    ("generation", "says"),
    [
        ('{"eos_token_id": "17"}', "model.id = '{folder}': eos_token_id = '17': "),
        ('{"eos_token_id": true}', "eos_token_id = True: "),
        ('{"eos_token_id": [17, null]}', "eos_token_id = [17, None]: "),
        ("{bad", "{folder}/generation_config.json: cannot be read: Expecting property name"),
        ("[17]", "{folder}/generation_config.json: "),
    ],
)
def test_wrong_eos_tokens_are_refused_before_weights_are_loaded(folder: Path, generation: str, says: str) -> None:
    (folder / "generation_config.json").write_text(generation)
    assert says.replace("{folder}", str(folder)) in refused(check_model, str(folder), dtype="float32", revision=None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
@pytest.mark.by_default("llama3")
def test_scaled_rope_against_the_plain_generator(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Tolerances are those without scaling: shared prompts move logits by about 1e-6."""
    folder = save_random_model(tmp_path / "model", "llama", rope_parameters=rope | {"rope_theta": 1e4})
    document, horizon, action = random_document("d170", 170), 12, Action("s", "snapkv", SnapKV(), Retention(85))
    (unit,) = generate_units(load_model(str(folder)), "s", document, [PendingUnit(action, 0, 4)], horizon, 3)
    plain = plain_twin(load_eager(folder), document, "s", keep_snapkv(85), 4, horizon)
    assert_like_plain(unit, plain)
    assert plain.delta.max() > 0.01


@pytest.mark.slow
def test_loading_says_nothing(folder: Path) -> None:
    """Neither on standard output nor on standard error, a needless tensor in the files included."""
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.needless": torch.zeros(3)}))
    program = f"from kvdrift.generator.transformer.loading import load_model; load_model({str(folder)!r})"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
