"""llama.cpp in this process: its library's layout, logits against transformers, streams, settings, bytes, refusals."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.command import call, mistake
from fixtures.gguf_models import write_random_llama
from transformers import AutoModelForCausalLM

from kvdrift.generator.checks.sides import ADAPTER_CHECKS
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.llama_cpp import Context, ContextSettings
from kvdrift.generator.llama_cpp import library as libraries
from kvdrift.generator.llama_cpp.gguf import Weights, gguf_facts, load_gguf_tokenizer
from kvdrift.generator.llama_cpp.library import (
    CONTEXT_DEFAULTS,
    MODEL_DEFAULTS,
    ContextParameters,
    ModelParameters,
    library,
)
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER, EMBEDDED_GGUF
from kvdrift.schema.errors import InputError, OperationError

pytestmark = pytest.mark.llama_cpp

TINY = EMBEDDED_GGUF / "tiny-F32.gguf"
POSITIONS = 64


def context(entries: int = 2000, **settings: object) -> Context:
    return Context(Weights(TINY), ContextSettings.of({"threads": 1, **settings}, "here"), entries)


@pytest.mark.parametrize(
    ("kind", "defaults"), [(ModelParameters, MODEL_DEFAULTS), (ContextParameters, CONTEXT_DEFAULTS)]
)
def test_other_defaults_are_other_structures(
    monkeypatch: pytest.MonkeyPatch, kind: type[ctypes.Structure], defaults: dict[str, Any]
) -> None:
    assert [field[0] for field in kind._fields_] == list(defaults)
    assert library().parameters(kind)
    for name, value in defaults.items():
        monkeypatch.setitem(defaults, name, 7)
        with pytest.raises(InputError, match=f"{name} = {value}, where 7 is known"):
            library().parameters(kind)
        monkeypatch.setitem(defaults, name, value)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "VERSION", "1.0")
    with pytest.raises(InputError, match=r"its structures are not known, only those of 1\.0"):
        library.__wrapped__()


@pytest.mark.parametrize("flash", [False, True])
def test_logits_are_those_of_transformers_at_every_decoded_position(*, flash: bool) -> None:
    network = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER)
    # Flash attention of a CPU reads keys and values in 16 bits, whatever they are stored as.
    bound = 5e-2 if flash else 2e-4
    for number in range(3):
        tokens = list(make_document("needle", 768, number, 7).tokens)
        side = context(type_k="f32", type_v="f32", flash_attention=flash)
        found, stream = [side.prefill(tokens)], side.fork()
        for _ in range(POSITIONS):
            tokens.append(int(found[-1].argmax()))
            found.append(side.step([stream], [tokens[-1]])[0])
        with torch.no_grad():
            expected = network(torch.tensor([tokens])).logits[0, -POSITIONS - 1 :].numpy()
        assert np.abs(np.stack(found) - expected).max() < bound
        assert (np.stack(found).argmax(1) == expected.argmax(1)).all()


def test_a_fork_is_a_copy_and_a_drop_frees() -> None:
    tokens = make_document("needle", 384, 0, 7).tokens
    side = context(entries=len(tokens) + 40, rows=1)
    side.prefill(tokens)
    first = side.fork()
    side.step([first], [9])
    second = side.fork(first)
    both = side.step([first, second], [11, 11])
    np.testing.assert_array_equal(both[0], both[1])
    apart = side.step([first, second], [12, 13])
    assert np.abs(apart[0] - apart[1]).max() > 1e-3
    third = side.fork(second)
    np.testing.assert_array_equal(side.step([third], [14]), side.step([second], [14]))
    for stream in (first, second, third):
        side.drop(stream)
    assert side.open_streams == 0
    for _ in range(60):  # more than the cache has room for, if nothing were freed
        stream = side.fork()
        for token in range(10, 30):
            side.step([stream], [token])
        side.drop(stream)


def test_a_full_cache_is_said_so() -> None:
    tokens = make_document("needle", 384, 0, 7).tokens
    side = context(entries=len(tokens))
    side.prefill(tokens)
    streams = [side.fork() for _ in range(200)]
    side.step(streams[:100], [9] * 100)
    with pytest.raises(OperationError, match="no room"):
        side.step(streams, [9] * 200)


def test_bytes_are_measured_and_fall_with_bits() -> None:
    tokens = make_document("needle", 768, 0, 7).tokens

    def held(kind: str) -> int:
        side = context(type_k=kind, type_v=kind)
        side.prefill(tokens)
        return side.prompt_bytes()

    sizes = [held(kind) for kind in ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_0")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    values = 2 * 3 * 2 * 32 * len(tokens)  # keys and values, layers, heads, channels
    assert values * 2 < sizes[1] < values * 2 * 1.1


def test_settings_are_read_back() -> None:
    side = context(type_k="q8_0", type_v="q4_0", ubatch=128)
    assert {name: side.read_back[name] for name in ("type_k", "type_v", "flash_attention", "ubatch", "threads")} == {
        "type_k": "q8_0", "type_v": "q4_0", "flash_attention": True, "ubatch": 128, "threads": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type_q": "f16"}, "unknown setting 'type_q' of llama.cpp; did you mean"),
        ({"type_k": "q9_0"}, "type_k = 'q9_0'"),
        ({"ubatch": "512"}, "ubatch = '512': write a value like 512"),
        ({"threads": -1}, "threads = -1: write 0 to 512"),
        ({"type_v": "q8_0", "flash_attention": False}, "quantized values need flash_attention = true"),
    ],
)
def test_settings_that_llama_cpp_does_not_take_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ContextSettings.of(settings, "here")


@pytest.mark.parametrize("size", [48, 80])
def test_such_heads_give_no_numbers_if_nobody_refuses_them(tmp_path: Path, size: int) -> None:
    """The reason for refusing such heads: llama.cpp opens the context without an error."""
    weights = Weights(write_random_llama(tmp_path / "model.gguf", head_size=size))
    asked = ContextSettings.of({"type_k": "q8_0", "flash_attention": False, "threads": 1}, "here")
    assert np.isnan(Context(weights, asked, 500).prefill(range(3, 40))).any()


@pytest.mark.parametrize("size", [16, 48, 80])
def test_a_study_of_such_heads_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int) -> None:
    write_random_llama(tmp_path / "model.gguf", head_size=size)
    study = tmp_path / "study.toml"
    assert call(capsys, "init", study, "--engine", "llama.cpp")[0] == 0
    study.write_text(study.read_text().replace("kvdrift/tiny-F32.gguf", "model.gguf"))
    said = mistake(capsys, "run", study, "--dry-run", "--store", tmp_path / "store")
    assert (
        f"action 'cache-q8_0': type_k = 'q8_0': stores blocks of 32 values, and the model's heads have {size}" in said
    )


def test_quantized_caches_are_rotated_where_64_divides_the_head_size(tmp_path: Path) -> None:
    file = write_random_llama(tmp_path / "model.gguf", head_size=64)
    made = Context(Weights(file), ContextSettings.of({"type_k": "q8_0", "type_v": "q8_0", "threads": 1}, "here"), 500)
    assert (made.read_back["rotated_k"], made.read_back["rotated_v"]) == (64, 64)
    assert context(type_k="q8_0", type_v="q8_0").read_back["rotated_k"] == 0


def test_what_a_file_says_of_its_model(tmp_path: Path) -> None:
    facts = gguf_facts(TINY)
    assert (facts.architecture, facts.vocabulary, facts.positions, facts.eos_tokens) == ("qwen2", 256, 4096, (2,))
    assert (facts.has_tokenizer, load_gguf_tokenizer(TINY)) == (False, None)
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(InputError, match="is no GGUF file"):
        gguf_facts(tmp_path / "text.gguf")
    with pytest.raises(InputError, match="cannot be read"):
        gguf_facts(tmp_path / "none.gguf")
    (tmp_path / "torn.gguf").write_bytes(TINY.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"llama\.cpp cannot load it"):
        gguf_facts(tmp_path / "torn.gguf")


def test_the_command_checks_the_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "check", "llama.cpp", "--weights", TINY)
    assert (code, err) == (0, "")
    assert out.endswith(f"llama.cpp: all {len(ADAPTER_CHECKS)} checks hold\n")
