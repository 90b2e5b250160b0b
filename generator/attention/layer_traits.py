"""Properties of layers that selectors may need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerTraits:
    """Properties of a model's layers with full attention.

    Attributes:
        kind: The model's type, as transformers names it; None if not known.
        softcap: The soft cap of attention scores, or None.
        turned_by_halves: Whether every such layer rotates whole heads, channel i together with channel i + size / 2, by
            angles that the model's rotary embedding gives. None before a model is loaded whose family is not known.
    """

    kind: str | None = None
    softcap: float | None = None
    turned_by_halves: bool | None = None


UNKNOWN = LayerTraits()


def attention_modules(network: Any) -> dict[int, Any]:
    """Return the attention module of each layer that has one, by the layer's number in the network, ascending.

    Args:
        network: A transformers causal language model.
    """
    layers = getattr(getattr(network, "model", None), "layers", ())
    found = ((number, getattr(layer, "self_attn", None)) for number, layer in enumerate(layers))
    return {number: module for number, module in found if module is not None}
