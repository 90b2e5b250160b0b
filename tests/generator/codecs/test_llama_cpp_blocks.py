"""Block formats against gguf, llama.cpp's package: the numbers that it reads back, and the bytes that it packs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from fixtures.refusals import refused
from gguf import GGMLQuantizationType, quants
from scipy.linalg import block_diag, hadamard

from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.errors import OperationError

TYPES = {name: GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_1", "q4_0", "mxfp4")}
NAMES = pytest.mark.parametrize("name", TYPES)


def random_layers() -> Iterator[PrefixLayer]:
    """Yield numbers of many magnitudes, in heads of one and of four blocks; numbers with outliers; blocks of zeros."""
    generator = torch.Generator().manual_seed(0)
    for size in (32, 128):
        for scale in (1e-6, 1e-3, 1.0, 300.0):
            yield PrefixLayer(*torch.randn(2, 2, 70, size, generator=generator) * scale)
    key, value = torch.randn(2, 2, 90, 64, generator=generator)
    key[..., 3] += 50
    key[0, :, 40] -= 2000
    value[:, ::5] *= 100
    value[:, 1::5, 7] = 900
    yield PrefixLayer(key, value)
    key, value = torch.randn(2, 2, 40, 64, generator=generator)
    key[:, ::3], value[:, ::3, :32], value[0, 1] = 0, 0, 0
    key[:, 1] = 0.7
    yield PrefixLayer(key, value)


@cache
def embedded_layers() -> list[PrefixLayer]:
    """Keys as cached and values of a prompt of the embedded model."""
    tokens = make_document("needle", 384, 0, 7).tokens
    layers = Prompt(load_model(EMBEDDED_ID), tokens, 1).layers
    return [PrefixLayer(layer.key, layer.value) for layer in layers]


def packed(numbers: torch.Tensor, name: str) -> Any:
    return quants.quantize(numbers.contiguous().numpy(), TYPES[name])


@NAMES
@pytest.mark.parametrize("source", [random_layers, embedded_layers])
def test_numbers_and_bytes_are_those_of_gguf(name: str, source: Any) -> None:
    """Numbers are equal bit for bit, but for the sign of zeros; random numbers have none of the ties of mxfp4.

    gguf gives these to the lower magnitude, and the specification of the format to the even code.
    """
    codec = CODECS[name]()
    for layer in source():
        held, count = codec.hold(layer), 0
        for numbers, read in ((layer.key, held.key), (layer.value, held.value)):
            stored = packed(numbers, name)
            assert torch.equal(read, torch.from_numpy(quants.dequantize(stored, TYPES[name])))
            count += stored.nbytes
        assert codec.layer_bytes(layer).total == count


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0"])
def test_ties_are_those_of_gguf(name: str) -> None:
    """The scale of each format is 1 or -1 in turn, so that odd multiples of 1/2 are ties."""
    numbers = torch.arange(-127, 128, dtype=torch.float32).repeat_interleave(2)[:509] / 2
    rows = torch.cat([numbers, torch.zeros(3)]).view(1, 16, 32)
    for largest in (127.0, -127.0, 8.0, -8.0, 31.0, -31.0):
        blocks = rows.remainder(abs(largest) - 0.5) * torch.tensor(largest).sign()
        blocks[..., 0], blocks[..., 1] = largest, 0
        expected = quants.dequantize(packed(blocks, name), TYPES[name])
        assert torch.equal(CODECS[name]().round_trip(blocks, "keys"), torch.from_numpy(expected))


def test_numbers_that_a_scale_in_float16_cannot_have_are_refused() -> None:
    """llama.cpp reads back infinities."""
    numbers = torch.full((1, 1, 32), -1e5)
    with pytest.warns(RuntimeWarning, match="overflow"):
        stored = packed(numbers, "q5_1")
    assert not torch.from_numpy(quants.dequantize(stored, TYPES["q5_1"])).isfinite().any()
    line = refused(CODECS["q5_1"]().hold, PrefixLayer(numbers, numbers), error=OperationError)
    assert line == "codec Q5_1: keys come back with a number that is not finite"


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0"])
@pytest.mark.parametrize(("size", "of_keys"), [(64, 64), (128, 128), (192, 64), (256, 256)])
def test_rotated_heads_are_turned_in_the_parts_that_llama_cpp_reports(name: str, size: int, of_keys: int) -> None:
    """llama.cpp reports these sizes as ``rotated_k`` and ``rotated_v``. Sums of whole numbers are exact in any order."""
    numbers = torch.randint(-99, 100, (2, 30, size), generator=torch.Generator().manual_seed(size)).float()
    numbers[..., 5] += 2000
    read = CODECS[name](rotated=True).hold(PrefixLayer(numbers, numbers))
    for back, together in ((read.key, of_keys), (read.value, 64)):
        matrix = torch.from_numpy(block_diag(*[hadamard(together)] * (size // together))).float()
        stored = quants.dequantize(packed(numbers @ matrix * together**-0.5, name), TYPES[name])
        assert torch.allclose(back, torch.from_numpy(stored) @ matrix * together**-0.5, rtol=1e-5, atol=2e-3)
