"""The attention function that transformers calls in every layer, registered as ``kvdrift``.

It receives rotated queries, keys and values, and hands them to the object that the model's forward call was given as
the keyword argument ``kvdrift_attention``: ``PromptRecording`` while a prompt is prefilled, ``SharedPrefix`` while
streams are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from kvdrift.generator.attention.parts import PLAIN, LayerTerms, attention_modules
from kvdrift.generator.attention.threads import adapt

IMPLEMENTATION = "kvdrift"


class LayerAttention(Protocol):
    """A way to attend, in any layer of the model."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: LayerTerms = PLAIN
    ) -> Tensor:
        """Compute the attention of one layer, [B, heads, T, size], from rotated queries [B, heads, T, size].

        Keys, rotated, and values are [B, KV heads, T, size]. ``layer`` is the layer's number among those with
        attention, from 0. ``terms`` describe attention beyond a softmax over all earlier positions.
        """


@dataclass(frozen=True)
class _Counted:
    """``LayerAttention`` for a network in which some layers have no attention; it renumbers the others.

    ``numbers`` maps the number of a layer among all layers to its number among those with attention.
    """

    attention: LayerAttention
    numbers: Mapping[int, int]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: LayerTerms = PLAIN
    ) -> Tensor:
        """Attend in the layer that has number ``layer`` among all layers."""
        return self.attention.attend(self.numbers[layer], query, key, value, scaling, terms)


def counted(attention: LayerAttention, network: Any) -> LayerAttention:
    """Return attention that is called with a layer's number among all layers of the network, and calls ``attention``.

    ``attention`` is called with the layer's number among the layers that have attention.
    """
    modules = attention_modules(network)
    if len(modules) == len(network.model.layers):
        return attention
    return _Counted(attention, {number: place for place, number in enumerate(modules)})


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of transformers' calling convention
    dropout: float = 0.0,  # noqa: ARG001 - transformers passes it in sixth place
    scaling: float = 1.0,
    *,
    kvdrift_attention: LayerAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    adapt()
    layer: Any = module.layer_idx
    plain = not (sliding_window or softcap) and s_aux is None
    terms = PLAIN if plain else LayerTerms(sliding_window or None, softcap or None, s_aux)
    output = kvdrift_attention.attend(layer, query, key, value, scaling, terms)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attend)
