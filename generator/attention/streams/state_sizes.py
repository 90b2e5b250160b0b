"""Sizes of states in hybrid models, computed from ``config.json``.

For families that are not known here, states count as 0 bytes before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RECURRENT_BYTES = 4  # recurrent states are float32, whatever the model's dtype


def layers_without_attention(config: Mapping[str, Any]) -> int:
    """Return the number of layers that have a state in place of entries."""
    return sum(kind in ("conv", "linear_attention") for kind in config.get("layer_types") or ())


def state_bytes(config: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of all states of one stream.

    Args:
        config: The contents of ``config.json``.
        item_bytes: Bytes of a number in the model's dtype, which a convolution's last inputs have.
    """
    return sum(count * size for count, size in _kinds(config, item_bytes))


def layer_state_bytes(config: Mapping[str, Any], item_bytes: int) -> int:
    """Count bytes of the states of one stream in the layer that has most, by the arguments of ``state_bytes``."""
    return max((size for count, size in _kinds(config, item_bytes) if count), default=0)


def _kinds(config: Mapping[str, Any], item_bytes: int) -> list[tuple[int, int]]:
    """How many layers have states of each kind, and the bytes of one layer's."""
    kinds = list(config.get("layer_types") or ())
    short = int(config["hidden_size"]) * int(config.get("conv_L_cache") or 0) * item_bytes if "conv" in kinds else 0
    mixers = int(config["num_hidden_layers"]) if config.get("model_type") == "falcon_h1" else 0
    return [
        (kinds.count("conv"), short),
        (kinds.count("linear_attention"), _delta_net(config, item_bytes)),
        (mixers, _mamba(config, item_bytes) if mixers else 0),
    ]


def _delta_net(config: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of a layer with the gated delta rule (Qwen3-Next, Qwen3.5): a matrix for each value head."""
    if "linear_num_key_heads" not in config:
        return 0
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    heads = int(config["linear_num_value_heads"])
    channels = 2 * int(config["linear_num_key_heads"]) * key + heads * value
    return channels * int(config["linear_conv_kernel_dim"]) * item_bytes + heads * key * value * _RECURRENT_BYTES


def _mamba(config: Mapping[str, Any], item_bytes: int) -> int:
    """A layer of Falcon-H1, which has attention beside a state-space mixer."""
    inner = config.get("mamba_d_ssm") or int(config["mamba_expand"] * config["hidden_size"])
    state = int(config["mamba_d_state"])
    channels = int(inner) + 2 * int(config["mamba_n_groups"]) * state
    return channels * int(config["mamba_d_conv"]) * item_bytes + int(inner) * state * _RECURRENT_BYTES
