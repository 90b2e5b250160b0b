"""Find the layers of a network that have attention; in a hybrid only some layers have it."""

from __future__ import annotations

from typing import Any


def attention_modules(network: Any) -> dict[int, Any]:
    """Return the attention module of each layer that has one, by the layer's number in the network, ascending.

    Args:
        network: A transformers causal language model.
    """
    layers = getattr(getattr(network, "model", None), "layers", ())
    found = ((number, getattr(layer, "self_attn", None)) for number, layer in enumerate(layers))
    return {number: module for number, module in found if module is not None}
