"""Compare codecs of libraries with transformers' quantized cache, and check the error line without the library.

Tests marked ``quantizers`` need hqq; ``make quantizers`` installs it and runs them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from fixtures.refusals import refused
from torch import Tensor
from transformers import LlamaConfig

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs import CODECS, hqq
from kvdrift.generator.codecs.hqq import HQQ
from kvdrift.generator.identity import parts_sha256
from kvdrift.schema.study import ActionSection

needs_quantizers = pytest.mark.quantizers
NAMES = [name for name, kind in CODECS.items() if issubclass(kind, HQQ)]


def action(name: str, **parameters: Any) -> Action:
    return build_action(ActionSection(name="mine", codec={"name": name, **parameters}))


def codec_of(name: str, **parameters: Any) -> HQQ:
    codec = action(name, **parameters).codec
    assert isinstance(codec, HQQ)
    return codec


def layer_of(entries: int, heads: int = 2, size: int = 64, dtype: str = "float32") -> PrefixLayer:
    """Random keys and values, with a channel of large keys."""
    generator = torch.Generator().manual_seed(entries)
    key, value = torch.randn(2, heads, entries, size, generator=generator)
    key[..., 1] += 30
    return PrefixLayer(key.to(DTYPES[dtype]), value.to(DTYPES[dtype]))


def cache_of(codec: HQQ, **options: Any) -> Any:
    """transformers' own cache of a model with one layer, as ``generate`` makes it."""
    from transformers.cache_utils import QuantizedCache  # noqa: PLC0415 - as of the library that it imports

    axes = {"axis_key": codec.axis_key, "axis_value": codec.axis_value}
    config = LlamaConfig(num_hidden_layers=1)
    return QuantizedCache("hqq", config, nbits=codec.bits, q_group_size=codec.group, **axes, **options)


# --- Without the library -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_without_the_library_the_line_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: str) -> str:
        raise PackageNotFoundError(library)

    monkeypatch.setattr(hqq, "version", missing)
    line = refused(action, name)
    assert line.startswith(f"action 'mine': {CODECS[name].__name__} needs hqq, ")
    assert "'kvdrift[quantizers]'" in line


# --- Against transformers' cache ---------------------------------------------------------------------------------------


@needs_quantizers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_steps_of_transformers_cache_read(name: str, axis: int, dtype: str) -> None:
    """Equal bit for bit while the cache leaves generated entries exact; later the cache stores all of them again."""
    codec, layer, more = (
        codec_of(name, axis_key=axis, axis_value=axis),
        layer_of(150, dtype=dtype),
        layer_of(6, dtype=dtype),
    )
    cache, held = cache_of(codec, residual_length=4), codec.hold(layer)
    exact, _ = cache.update(layer.key[None], layer.value[None], 0)
    assert torch.equal(exact[0], layer.key), "prefill itself reads the prompt as computed"
    same = []
    for step in range(6):
        key, value = cache.update(more.key[None, :, step : step + 1], more.value[None, :, step : step + 1], 0)
        assert key.dtype == held.key.dtype == layer.key.dtype
        same.append(torch.equal(key[0, :, :150], held.key) and torch.equal(value[0, :, :150], held.value))
        if step < 4:
            assert torch.equal(key[0, :, 150:], more.key[:, : step + 1])
    assert same[:4] == [True] * 4
    assert not all(same[4:]), "what was read back is quantized again"


@needs_quantizers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_librarys_tensors(name: str, dtype: str) -> None:
    def bytes_of(*tensors: Tensor) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    for parameters in ({}, {"axis_key": 1, "group": 32}):
        codec, layer = codec_of(name, **parameters), layer_of(134, dtype=dtype)
        cache = cache_of(codec)
        cache.update(layer.key[None], layer.value[None], 0)
        both = (cache.layers[0]._quantized_keys, cache.layers[0]._quantized_values)
        counted = codec.layer_bytes(layer)
        assert counted.payload == bytes_of(*(packed for packed, _ in both))
        assert counted.scales == sum(bytes_of(meta["scale"], meta["zero"]) for _, meta in both)


# --- What is refused, and the identity ---------------------------------------------------------------------------------


@needs_quantizers
def test_what_the_library_cannot_store_is_refused_in_one_line() -> None:
    codec, odd = codec_of("hqq-int4", axis_key=1), layer_of(3, heads=1)
    assert "96" in refused(codec.check, 96, "keys")
    codec.check(128, "values")
    for call in (codec.hold, codec.layer_bytes):
        assert refused(call, odd).startswith("HQQInt4: hqq cannot store 3 entries of 1 KV heads of 64 channels ")
    cache, step = cache_of(codec), layer_of(1, heads=1)
    cache.update(odd.key[None], odd.value[None], 0)
    with pytest.raises(RuntimeError):  # at the first step that reads
        cache.update(step.key[None], step.value[None], 0)


@needs_quantizers
def test_generated_entries_are_not_coded() -> None:
    assert "HQQInt4 codes prompt entries alone" in refused(action, "hqq-int4", generated=True)


@needs_quantizers
def test_the_librarys_version_is_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = action("hqq-int4")
    assert mine.codec_parameters == {"hqq": version("hqq"), "group": 64, "axis_key": 0, "axis_value": 0}
    before = parts_sha256(mine.parts)
    monkeypatch.setattr(hqq, "version", lambda _: "99")
    assert parts_sha256(mine.parts) != before
