"""Codecs of generated entries: with ``generated = true``, entries are coded as they leave the residual window.

Before a token is fed, a cache has N entries: m kept entries of the prompt, and then generated ones. The codec treats
all N like a prompt: the last ``residual`` are exact, values before them are coded, and so are keys of the groups that
are full before them, counted from the first kept entry. So the tail of the prompt is coded in its turn, and a group of
keys may begin in the prompt and end among generated entries. The entry of the token that is fed is exact in its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.codec import Codec, GroupedCodec
from kvdrift.generator.codecs.coded_streams import CodedLayer, CodedStreams, EntryCoding
from kvdrift.generator.codecs.fp8 import FP8, at_scale, scale_of
from kvdrift.generator.codecs.identity import Identity
from kvdrift.generator.codecs.kivi import KIVI
from kvdrift.generator.codecs.rotated import RotatedInt4
from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class GeneratedEntries:
    """The part of an action by which its codec codes generated entries, too; a codec that cannot do so is refused."""

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, KIVI | RotatedInt4 | FP8 | Identity):
            raise InputError(
                f"generated = true: codec {type(self.codec).__name__} codes prompt entries alone; "
                "leave generated out, or use a codec derived from KIVI, RotatedInt4, FP8 or Identity"
            )

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {"generated": True}

    def rule(
        self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], held: Sequence[PrefixLayer], horizon: int
    ) -> CacheRule:
        """Return the rule that codes the entries of a prompt's streams with horizon H.

        For each layer, ``prompt`` has keys and values of the whole prompt; ``kept`` has the kept positions, int32
        [KV heads, m]; and ``held`` has the entries that attention reads; the rule later codes, in place,
        those that are still exact.
        """
        codec, window, together = self.codec, 0, 1
        coding: EntryCoding
        if isinstance(codec, FP8):
            coding = _AtPromptScales.of(prompt, kept)
        elif isinstance(codec, GroupedCodec):
            window, together = codec.residual, codec.group if isinstance(codec, KIVI) else 1
            coding = _RoundTrip(replace(codec, residual=0))
        else:
            coding = _RoundTrip(codec)
        layers = [CodedLayer.of(layer, window, together) for layer in held]
        return CodedStreams(coding, window, together, layers, horizon)


@dataclass(frozen=True)
class _RoundTrip(EntryCoding):
    """The round trip of a codec without a window, with a scale for each entry or group."""

    codec: Codec

    def read_back(self, keys: Tensor, values: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the entries as the codec holds them."""
        first, second = keys.flatten(0, 2), values.flatten(0, 2)  # [layers x R x KV heads, entries, size]
        if first.shape == second.shape:
            back = self.codec.hold(PrefixLayer(first, second))
        else:
            key = self.codec.hold(PrefixLayer(first, first)).key if first.shape[1] else first
            value = self.codec.hold(PrefixLayer(second, second)).value if second.shape[1] else second
            back = PrefixLayer(key, value)
        return back.key.view(keys.shape), back.value.view(values.shape)


@dataclass(frozen=True)
class _AtPromptScales(EntryCoding):
    """Codes in e4m3 at the scales stored for a cache's prompt entries; magnitudes are cut off at 448 times a scale."""

    keys: Sequence[Tensor]  # for each layer the scales of the KV heads' keys, float32 [KV heads, 1, 1]
    values: Sequence[Tensor]  # the scales of their values

    @classmethod
    def of(cls, prompt: Sequence[PromptLayer], kept: Sequence[Tensor]) -> _AtPromptScales:
        """Find the scales of the kept entries of a prompt."""
        return cls(*(
            [_scale(part, positions) for part, positions in zip(parts, kept, strict=True)]
            for parts in ([layer.key for layer in prompt], [layer.value for layer in prompt])
        ))  # fmt: skip

    def read_back(self, keys: Tensor, values: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the numbers, each rounded to e4m3."""
        return _at_scales(keys, self.keys, layers), _at_scales(values, self.values, layers)


def _scale(numbers: Tensor, positions: Tensor) -> Tensor:
    """Return the scales of ``FP8``, [KV heads, 1, 1], for entries of ``numbers`` [KV heads, n, size].

    ``positions`` [KV heads, m] are the entries' positions.
    """
    largest = numbers.abs().amax(2).gather(1, positions.long()).amax(1)
    return scale_of(largest.float())[:, None, None]


def _at_scales(numbers: Tensor, scales: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    scale = torch.stack([scales[layer] for layer in layers])[:, None]  # [layers, 1, KV heads, 1, 1]
    return at_scale(numbers.float(), scale).to(numbers.dtype)
