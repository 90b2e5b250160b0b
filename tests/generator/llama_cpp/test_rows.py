"""A stream's logits are the same bits whatever streams are beside it, as far as kernels of llama.cpp allow that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fixtures.gguf_models import write_random_llama
from numpy.typing import NDArray

from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.engines.llama_cpp import Context, ContextSettings
from kvdrift.generator.llama_cpp.gguf import Weights
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_GGUF

pytestmark = pytest.mark.llama_cpp

PROMPT = make_document("needle", 768, 0, 7).tokens
STEPS = 12
FLASH = ({}, {"type_k": "q8_0", "type_v": "q4_0"}, {"type_k": "f32", "type_v": "f32"}, {"threads": 2}, {"rows": 2})


def written(
    file: Path, settings: dict[str, object], beside: int, closed_at: int | None = None, entries: int = 3000
) -> NDArray[np.float32]:
    """Logits of one stream in the middle of others, [steps, V]; at a step the others before it are closed."""
    side = Context(Weights(file), ContextSettings.of({"threads": 1, **settings}, "here"), entries)
    side.prefill(PROMPT)
    streams = [side.fork() for _ in range(beside + 1)]
    own, random, found = streams[beside // 2], np.random.default_rng(beside), []
    for step in range(STEPS):
        if step == closed_at:
            for stream in streams[: streams.index(own)]:
                side.drop(stream)
            streams = streams[streams.index(own) :]
        tokens = [9 + step if stream == own else int(random.integers(10, 250)) for stream in streams]
        found.append(side.step(streams, tokens)[streams.index(own)])
    side.close()
    return np.stack(found)


@pytest.mark.parametrize("settings", FLASH, ids=str)
def test_streams_beside_it_change_no_bit(settings: dict[str, object]) -> None:
    file = EMBEDDED_GGUF / "tiny-F32.gguf"
    alone = written(file, settings, 0)
    for beside, closed_at in ((1, None), (6, None), (33, None), (15, 5)):
        np.testing.assert_array_equal(written(file, settings, beside, closed_at), alone)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_nor_with_quantized_weights(kind: str) -> None:
    file = EMBEDDED_GGUF / f"tiny-{kind}.gguf"
    np.testing.assert_array_equal(written(file, {}, 15, 5), written(file, {}, 0))


@pytest.mark.parametrize("size", [64, 128])
def test_nor_where_quantized_entries_are_rotated(tmp_path: Path, size: int) -> None:
    file = write_random_llama(tmp_path / "model.gguf", head_size=size)
    settings = {"type_k": "q8_0", "type_v": "q8_0"}
    np.testing.assert_array_equal(written(file, settings, 15, 5), written(file, settings, 0))


def test_one_row_a_call_is_a_path_of_its_own() -> None:
    """A usual user of the library calls it so: no row is put beside the stream."""
    file = EMBEDDED_GGUF / "tiny-F32.gguf"
    single = written(file, {"rows": 1}, 0)
    np.testing.assert_array_equal(written(file, {"rows": 1}, 6, 5), single)
    assert 0 < np.abs(single - written(file, {}, 0)).max() < 1e-1


def test_calls_of_64_rows_and_sums_without_flash_attention_depend_on_rows_beside() -> None:
    file = EMBEDDED_GGUF / "tiny-F32.gguf"
    for settings, beside in (({"rows": 256}, 63), ({"flash_attention": False}, 6)):
        apart = np.abs(written(file, settings, beside) - written(file, settings, 0)).max()
        assert 0 < apart < 1e-1, settings


def test_a_full_cache_takes_the_places_of_closed_streams() -> None:
    """There is room for 255 entries beside the prompt: enough for all streams, if places are used again."""
    side = Context(
        Weights(EMBEDDED_GGUF / "tiny-F32.gguf"), ContextSettings.of({"threads": 1}, "here"), len(PROMPT) + 250
    )
    side.prefill(PROMPT)
    lasting = side.fork()
    for _ in range(4):
        others = [side.fork() for _ in range(12)]
        for step in range(8):
            side.step([lasting, *others], [9 + step] * 13)
        for stream in others:
            side.drop(stream)
    assert side.open_streams == 1
