"""TurboQuant against vLLM's own kernels, which Triton's interpreter runs on the CPU in vLLM's environment."""

from __future__ import annotations

import json
import math
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.vllm_server import PYTHON
from oracles.plain_codecs import E4M3, Stored, nearest
from torch import Tensor

from kvdrift.generator.codecs import CODECS
from kvdrift.generator.codecs.turboquant import TurboQuant, lloyd_max_centroids
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.prompt import Prompt

pytestmark = pytest.mark.vllm

PRESETS = {
    "turboquant_k8v4": "turboquant-k8v4", "turboquant_4bit_nc": "turboquant-4bit",
    "turboquant_k3v4_nc": "turboquant-k3v4", "turboquant_3bit_nc": "turboquant-3bit",
}  # fmt: skip
CASES = pytest.mark.parametrize("preset", PRESETS)
GROUP = 2  # query heads of a KV head
HALF, TINY = 2.0**-11, 2.0**-25  # the largest error of rounding to float16, of a normal number and of a small one


def layers() -> dict[str, tuple[Tensor, Tensor]]:
    """Return keys and values, numbers of float16, [KV heads, entries, size]: random ones, and the embedded model's."""
    generator, made = torch.Generator().manual_seed(0), {}
    for size in (64, 128):
        key, value = torch.randn(2, 2, 24, size, generator=generator)
        key[..., 1] += 30
        key[0, 3], value[0, 3], value[0, 4] = 0, 0, 0.3
        made[f"random {size}"] = key, value
    prompt = Prompt(load_model(EMBEDDED_ID), make_document("needle", 384, 0, 7).tokens[:24], 1)
    made |= {f"embedded {layer.number}": (layer.key, layer.value) for layer in prompt.layers}
    return {name: tuple(part.half().float() for part in parts) for name, parts in made.items()}  # type: ignore[misc]


def in_e4m3(numbers: Tensor) -> Tensor:
    return numbers.clone().apply_(lambda number: float(nearest(number, E4M3, Stored(bits=[[]]))))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's kernels read of every layer by every preset, made in one process.

    The interpreter's conversion to e4m3 is wrong: it loses the carry of a rounded mantissa, so that 1.96 becomes 1.
    Keys for 8 bits are therefore numbers of e4m3 already. Triton is that of the tests' environment.
    """
    folder, arrays = tmp_path_factory.mktemp("kernels"), {}
    generator = torch.Generator().manual_seed(1)
    for name, (key, value) in layers().items():
        queries = torch.randn(GROUP * len(key), key.shape[-1], generator=generator)
        by_entry = {"key": key, "key_in_e4m3": in_e4m3(key), "value": value}
        arrays |= {f"{name}/{part}": numbers.transpose(0, 1).half().numpy() for part, numbers in by_entry.items()}
        arrays[f"{name}/query"] = queries.numpy()
    np.savez(folder / "layers.npz", **arrays)
    (folder / "triton").symlink_to(Path(str(find_spec("triton").origin)).parent)  # type: ignore[union-attr]
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder), "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [str(PYTHON), str(Path(__file__).with_name("turboquant_kernels.py")), "layers.npz", "read.npz"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    read = dict(np.load(folder / "read.npz"))
    return read | {f"{name}/query": arrays[f"{name}/query"] for name in layers()}


def codec_of(preset: str) -> TurboQuant:
    codec = CODECS[PRESETS[preset]]()
    assert isinstance(codec, TurboQuant)
    return codec


def read_by_vllm(kernels: dict[str, Any], name: str, preset: str) -> tuple[Tensor, Tensor]:
    key, value = (torch.from_numpy(kernels[f"{name}/{preset}/{part}"]).transpose(0, 1) for part in ("key", "value"))
    return key, value


def test_presets_are_those_of_vllm(kernels: dict[str, Any]) -> None:
    expected = {
        preset: {
            "key_quant_bits": codec.keys,
            "value_quant_bits": codec.values,
            "norm_correction": codec.norm_correction,
        }
        for preset in PRESETS
        for codec in [codec_of(preset)]
    }
    assert json.loads(str(kernels["presets"])) == expected


@CASES
def test_bytes_of_a_vector_are_those_of_vllms_slots(kernels: dict[str, Any], preset: str) -> None:
    """vLLM adds a byte to an odd slot; no slot of these sizes is odd."""
    for name, (key, value) in layers().items():
        vectors = key.shape[0] * key.shape[1]
        own = [codec_of(preset).stored_bytes(part, kind).total for part, kind in ((key, "keys"), (value, "values"))]
        assert [*own, sum(own)] == [vectors * int(count) for count in kernels[f"{name}/{preset}/bytes"]]


@CASES
def test_numbers_are_those_of_vllms_kernels(kernels: dict[str, Any], preset: str) -> None:
    """The kernel returns float16; all else is equal but for float32's last bits.

    So values differ by a rounding to float16 at most. Of keys the rotated ones are rounded: the difference has at most
    2^-11 of the key's length, before and after the rotation.
    """
    codec = codec_of(preset)
    for name, (key, value) in layers().items():
        own_key, own_value = codec.round_trip(key, "keys"), codec.round_trip(value, "values")
        read_key, read_value = read_by_vllm(kernels, name, preset)
        assert bool(((own_value - read_value).abs() <= own_value.abs() * (HALF + 1e-6) + TINY).all()), name
        if codec.keys == 8:
            assert torch.equal(own_key, read_key), name
        else:
            apart, length = (own_key - read_key).norm(dim=-1), own_key.norm(dim=-1)
            assert bool((apart <= length * (HALF + 1e-5) + TINY * math.sqrt(key.shape[-1])).all()), name


@CASES
def test_attention_is_that_of_vllms_decoding(kernels: dict[str, Any], preset: str) -> None:
    """The kernel of decoding rotates queries instead of keys, and rounds nothing to float16."""
    codec = codec_of(preset)
    for name, (key, value) in layers().items():
        own_key, own_value = codec.round_trip(key, "keys"), codec.round_trip(value, "values")
        query = torch.from_numpy(kernels[f"{name}/query"]).unflatten(0, (-1, GROUP))
        weights = (query @ own_key.transpose(1, 2) / math.sqrt(key.shape[-1])).softmax(-1)
        expected = torch.from_numpy(kernels[f"{name}/{preset}/attention"])
        assert torch.allclose((weights @ own_value).flatten(0, 1), expected, atol=1e-5), name


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_centroids_are_those_of_vllm(kernels: dict[str, Any], bits: int) -> None:
    """vLLM has them in float32, for heads of 64 channels."""
    own = np.array(lloyd_max_centroids(bits)) / 8
    np.testing.assert_allclose(own, kernels[f"centroids/{bits}"], atol=1e-8)
