"""The layers of a network that have attention, and properties of layers that selectors may need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerTraits:
    """Properties of a model's layers with full attention; None is unknown, or no soft cap.

    ``kind`` is the model's type, as transformers names it. ``turned_by_halves`` tells whether every such layer rotates
    whole heads, channel i together with channel i + size / 2, by angles that the model's rotary embedding gives.
    """

    kind: str | None = None
    softcap: float | None = None
    turned_by_halves: bool | None = None


UNKNOWN = LayerTraits()


def attention_modules(network: Any) -> dict[int, Any]:
    """Return the attention module of each layer that has one, by the layer's number in the network, ascending."""
    layers = getattr(getattr(network, "model", None), "layers", ())
    found = ((number, getattr(layer, "self_attn", None)) for number, layer in enumerate(layers))
    return {number: module for number, module in found if module is not None}
