"""Codecs of generated entries: with ``generated = true``, entries are coded as they leave the residual window.

Before a token is fed, a cache has N entries: m kept entries of the prompt, and then generated ones. The codec treats
all N like a prompt: the last ``residual`` are exact, values before them are coded, and so are keys of the groups that
are full before them, counted from the first kept entry. So the tail of the prompt is coded in its turn, and a group of
keys may begin in the prompt and end among generated entries. The entry of the token that is fed is exact in its step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.codec import Codec, EntryCodec, GroupedCodec, Part, ScaledCodec
from kvdrift.generator.codecs.coded_streams import CodedLayer, CodedStreams, EntryCoding
from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class GeneratedEntries:
    """The part of an action by which its codec codes generated entries, too; a codec that cannot do so is refused."""

    codec: Codec

    def __post_init__(self) -> None:
        for part in _PARTS:
            codec = self.codec.of(part)
            if not isinstance(codec, GroupedCodec | EntryCodec | ScaledCodec):
                raise InputError(
                    f"generated = true: codec {type(codec).__name__} codes prompt entries alone; leave generated out, "
                    "or use a codec derived from KIVI, RotatedInt4, FP8, Identity or another codec of kvdrift but HQQ"
                )
        windows = [_window(self.codec.of(part)) for part in _PARTS]
        if len(set(windows)) > 1:
            raise InputError(
                f"generated = true: the last {windows[0]} keys and the last {windows[1]} values are exact; give both "
                "codecs the same residual, 0 beside a codec without one"
            )

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {"generated": True}

    def rule(
        self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], held: Sequence[PrefixLayer],
        exact: Collection[int], horizon: int,
    ) -> CacheRule:  # fmt: skip
        """Return the rule that codes the entries of a prompt's streams with horizon H.

        For each layer, ``prompt`` has keys and values of the whole prompt; ``kept`` has the kept positions, int32
        [KV heads, m]; and ``held`` has the entries that attention reads; the rule later codes, in place,
        those that are still exact. The layers numbered in ``exact`` are never coded.
        """
        keys, values = (self.codec.of(part) for part in _PARTS)
        window, together = _window(keys), keys.keys_together if isinstance(keys, GroupedCodec) else 1
        scales: dict[Part, list[Tensor]] = {
            "keys": _scales(keys, [layer.key for layer in prompt], kept),
            "values": _scales(values, [layer.value for layer in prompt], kept),
        }
        coding = _Coding(_without_window(keys), _without_window(values), scales)
        layers = [
            CodedLayer.never_coded(layer) if number in exact else CodedLayer.of(layer, window, together)
            for number, layer in enumerate(held)
        ]
        return CodedStreams(coding, window, together, layers, horizon)


_PARTS: tuple[Part, Part] = ("keys", "values")


def _window(codec: Codec) -> int:
    """Return how many of the last entries a codec leaves exact."""
    return codec.residual if isinstance(codec, GroupedCodec) else 0


def _without_window(codec: Codec) -> Codec:
    return replace(codec, residual=0) if isinstance(codec, GroupedCodec) else codec


def _scales(codec: Codec, numbers: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """Return the scales of each layer's kept entries; none if the codec has no scales for a whole layer.

    ``numbers`` are all keys or all values of each layer, [KV heads, n, size].
    """
    if not isinstance(codec, ScaledCodec):
        return []
    return [
        codec.scale_of(part.gather(1, positions.long()[..., None].expand(-1, -1, part.shape[-1])).float())
        for part, positions in zip(numbers, kept, strict=True)
    ]


@dataclass(frozen=True)
class _Coding(EntryCoding):
    """The round trips of two codecs without windows; scales of whole layers are those of the prompt's entries."""

    keys: Codec
    values: Codec
    scales: Mapping[Part, Sequence[Tensor]]  # of each layer, float32 [KV heads or 1, 1, 1]

    def read_back(self, keys: Tensor, values: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the entries as the codecs hold them."""
        return self._held(self.keys, keys, "keys", layers), self._held(self.values, values, "values", layers)

    def _held(self, codec: Codec, numbers: Tensor, part: Part, layers: Sequence[int]) -> Tensor:
        if not numbers.shape[3]:
            return numbers
        if isinstance(codec, ScaledCodec):
            scale = torch.stack([self.scales[part][layer] for layer in layers])[:, None]
            return codec.at_scale(numbers.float(), scale).to(numbers.dtype)
        return codec.held(numbers.flatten(0, 2), part).view(numbers.shape)  # [layers x R x KV heads, entries, size]
