"""Sliding windows in llama.cpp: streams past a window are the model's, whatever is beside them; bytes; refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.command import call, mistake
from fixtures.engine_study import study_text
from fixtures.gguf_models import write_random
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.llama_cpp import OUTPUT_ROWS, Context, ContextSettings, LlamaCpp
from kvdrift.generator.llama_cpp.gguf import Weights, gguf_facts
from kvdrift.generator.llama_cpp.library import Library
from kvdrift.schema.errors import InputError

pytestmark = pytest.mark.llama_cpp

WINDOW, STEPS = 32, 80
write_windowed = partial(write_random, layers=6, sliding_window=WINDOW)
TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 256, 400)]
STUDY = study_text(
    "windows", 'engine = "llama.cpp"\nid = "model.gguf"\nsettings = { threads = 1 }',
    'settings = { type_k = "q4_0", type_v = "q4_0" }', of="cache-q4_0",
)  # fmt: skip


def context(file: Path, **settings: Any) -> Context:
    given = {"threads": 1, "type_k": "f32", "type_v": "f32", "flash_attention": False} | settings
    return Context(Weights(file), ContextSettings.of(given, "here"), 4000)


def streamed(side: Context, prompt: int, steps: int, beside: int = 0, closed_at: int | None = None) -> NDArray[Any]:
    """Logits after the prompt and after each token of a stream in the middle of others, [1 + steps, V]."""
    found = [side.prefill(TOKENS[:prompt])]
    streams = [side.fork() for _ in range(beside + 1)]
    own = streams[beside // 2]
    for step in range(steps):
        if step == closed_at:
            for stream in streams[: streams.index(own)]:
                side.drop(stream)
            streams = streams[streams.index(own) :]
        tokens = [TOKENS[prompt + step] if one == own else TOKENS[-1 - step - one] for one in streams]
        found.append(side.step(streams, tokens)[streams.index(own)])
    return np.stack(found)


def expected(network: Any, prompt: int, steps: int) -> NDArray[Any]:
    with torch.no_grad():
        return np.asarray(network(torch.tensor([TOKENS[: prompt + steps]])).logits[0, prompt - 1 :])


def test_a_file_with_windows_is_taken_by_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary alone does not say that there are windows, and so decides nothing."""
    file = tmp_path / "model.gguf"
    write_windowed(file, "gemma3")
    handles = [Weights(file, vocabulary_only=only) for only in (True, False)]
    assert [one.library.calls.llama_model_n_swa(one.handle) for one in handles] == [0, WINDOW]
    assert gguf_facts(file).unsupported is None
    (tmp_path / "study.toml").write_text(STUDY)
    assert "checks hold" in call(capsys, "check", tmp_path / "study.toml")[1]
    asked = ("run", tmp_path / "study.toml", "--store", tmp_path / "store")
    assert "time of generation" in call(capsys, *asked, "--dry-run")[1]
    assert call(capsys, *asked)[0] == 0


@pytest.mark.parametrize("architecture", ["gemma3", "gemma2"])
@pytest.mark.parametrize("prompt", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_streams_around_and_past_the_window_are_the_models(tmp_path: Path, architecture: str, prompt: int) -> None:
    """huggingface/transformers 37574: a cache was wrong from the step at which a text's length is the window."""
    network = write_windowed(tmp_path / "model.gguf", architecture)
    found = streamed(context(tmp_path / "model.gguf"), prompt, STEPS)
    right = expected(network, prompt, STEPS)
    assert np.abs(found - right).max() < 2e-2  # of 10; llama.cpp looks its activation up in a table of 16 bits
    assert (found.argmax(1) == right.argmax(1)).all()
    network.config.sliding_window = WINDOW - 1
    for layer in network.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and WINDOW - 1
    assert np.abs(found - expected(network, prompt, STEPS)).max() > 0.1


@pytest.mark.parametrize("architecture", ["gemma3", "gemma2", "phi3"])
def test_a_stream_is_its_history_computed_as_a_prompt(tmp_path: Path, architecture: str) -> None:
    """ggml-org/llama.cpp 7709: Phi-3 wrote nonsense once a text was longer than its window.

    llama.cpp computes Phi-3 without windows, which units say.
    """
    write_windowed(tmp_path / "model.gguf", architecture)
    side = context(tmp_path / "model.gguf")
    found = streamed(side, 2 * WINDOW, STEPS)
    assert side.read_back["window"] == (0 if architecture == "phi3" else WINDOW)
    for step in (1, WINDOW // 2, WINDOW, STEPS):
        np.testing.assert_allclose(found[step], side.prefill(TOKENS[: 2 * WINDOW + step]), atol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"type_k": "q8_0", "type_v": "q4_0"}], ids=str)
def test_streams_beside_it_change_no_bit_past_the_window(tmp_path: Path, settings: dict[str, Any]) -> None:
    write_windowed(tmp_path / "model.gguf", "gemma3")
    alone = streamed(context(tmp_path / "model.gguf", flash_attention=True, **settings), 3 * WINDOW, STEPS)
    for beside, closed_at in ((1, None), (6, None), (33, None), (15, WINDOW + 5)):
        side = context(tmp_path / "model.gguf", flash_attention=True, **settings)
        np.testing.assert_array_equal(streamed(side, 3 * WINDOW, STEPS, beside, closed_at), alone)


def test_quantized_keys_without_flash_attention_stay_near_the_exact_ones(tmp_path: Path) -> None:
    """ggml-org/llama.cpp 8853: Gemma 2 was incoherent with quantized keys and without flash attention."""
    write_windowed(tmp_path / "model.gguf", "gemma2")
    exact, coded = (
        streamed(context(tmp_path / "model.gguf", type_k=kind), 2 * WINDOW, STEPS) for kind in ("f32", "q8_0")
    )
    assert 0 < np.abs(coded - exact).max() < 0.1 * np.abs(exact).max()


def test_the_caches_of_both_kinds_of_layers_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ggml-org/llama.cpp 21394: rotation of the two caches; 21277: a build whose cache of windows stays in 16 bits."""
    write_windowed(tmp_path / "model.gguf", "gemma3", head_size=64)
    settings = {"type_k": "q8_0", "type_v": "q8_0", "flash_attention": True}
    side = context(tmp_path / "model.gguf", **settings)
    assert {name: side.read_back[name] for name in ("type_k", "type_v", "rotated_k", "rotated_v")} == {
        "type_k": "q8_0", "type_v": "q8_0", "rotated_k": 64, "rotated_v": 64,
    }  # fmt: skip
    log_text = Library.log_text
    monkeypatch.setattr(Library, "log_text", lambda self: "K (f16):".join(log_text(self).rsplit("K (q8_0):", 1)))
    with pytest.raises(InputError, match=r"type_k = \['q8_0', 'f16'\], and q8_0 was requested"):
        context(tmp_path / "model.gguf", **settings)


def test_bytes_are_those_of_the_window_and_memory_is_that_of_whole_caches(tmp_path: Path) -> None:
    write_windowed(tmp_path / "model.gguf", "gemma3")
    held = {}
    for prompt in (WINDOW, 4 * WINDOW):
        side = context(tmp_path / "model.gguf")
        side.prefill(TOKENS[:prompt])
        held[prompt] = side.prompt_bytes()
    entry = 2 * 32 * 4  # of a layer: keys and values of a head, in float32
    # One layer has all entries, and five have those of a window; each entry has some bytes of position.
    added = held[4 * WINDOW] - held[WINDOW]
    assert 0 <= added - entry * 3 * WINDOW < 16 * 3 * WINDOW
    log = context(tmp_path / "model.gguf")._library.log_text()
    cells = [int(line.split("(")[1].split("cells")[0]) for line in log.splitlines() if "cells," in line]
    assert len(cells) == 2
    assert min(cells) >= 4000
    asked = {"type_k": "f32", "type_v": "f32", "threads": 1}
    estimated = LlamaCpp().side(str(tmp_path / "model.gguf"), asked, "here").cache_bytes(Room(cells[0], 0, 0))
    assert estimated == 6 * entry * cells[0] + OUTPUT_ROWS * 256 * 4


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("t5", "models with an encoder"),
        ("mamba", "recurrent models"),
        ("rwkv6", "recurrent models"),
        ("jamba", "recurrent models"),
        ("bert", "also reads the tokens after it"),
    ],
)
def test_what_has_no_streams_is_refused_from_the_files_own_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, said: str
) -> None:
    from gguf import GGUFWriter  # noqa: PLC0415 - of the extra llama-cpp

    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_vocab_size(256)
    writer.add_context_length(2048)
    writer.add_tokenizer_model("no_vocab")
    if architecture == "bert":
        writer.add_causal_attention(False)  # noqa: FBT003 - the writer has no keyword
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "study.toml").write_text(STUDY)
    for asked in (("check", tmp_path / "study.toml"), ("run", tmp_path / "study.toml", "--dry-run")):
        line = mistake(capsys, *asked)
        assert f"model.gguf: {architecture}: " in line
        assert said in line


def test_a_context_that_is_not_causal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some architectures are so without a word in the metadata."""
    write_windowed(tmp_path / "model.gguf", "gemma3")
    library = Weights(tmp_path / "model.gguf").library
    log_text = type(library).log_text
    monkeypatch.setattr(
        type(library), "log_text", lambda self: log_text(self).replace("causal_attn           = 1", "causal_attn = 0")
    )
    with pytest.raises(InputError, match="also reads the tokens after it"):
        context(tmp_path / "model.gguf")
