"""States of layers whose size does not grow with the prompt: the last inputs of a convolution, a recurrent matrix.

Layers of transformers ask a cache for a state by the layer's number and the state's number within the layer, and write
states back. A prompt has its states once, after its last token. Every stream has a copy of its own, of constant size.
Keys and values do not go through these objects: attention layers get back what they hand over.

Sizes of states are computed from ``config.json``. For families that are not known here, states count as 0 bytes before
a model is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_Place = tuple[str, int, int]  # what kind of state, the layer's number, the state's number within it
_CONVOLUTION, _RECURRENT = "convolution", "recurrent"
_RECURRENT_BYTES = 4  # recurrent states are float32, whatever the model's dtype


class LayerStates:
    """A cache for a network's layers that holds states of a batch of rows, [rows, ...] each, empty at first."""

    def __init__(self) -> None:
        self.by_place: dict[_Place, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.by_place.values())

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return an attention layer's new keys and values unchanged; they are stored elsewhere."""
        return key, value

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, [rows, channels, kernel]; None before the first token."""
        return self.by_place.get((_CONVOLUTION, layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, [rows, ...]; None before the first token."""
        return self.by_place.get((_RECURRENT, layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs of a convolution, [rows, channels, T], and keep the last inputs, as many as the kernel has.

        Returns the inputs, with the inputs kept before in front.
        """
        kernel, before = conv_kernel_size or conv_states.shape[-1], self.get_conv_state(layer_idx, state_idx)
        missing = max(kernel - conv_states.shape[-1], 0)
        whole = pad(conv_states, (missing, 0)) if before is None else torch.cat([before, conv_states], -1)
        self._keep((_CONVOLUTION, layer_idx, state_idx), whole[..., -kernel:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace a recurrent state, [rows, ...], and return the new one."""
        return self._keep((_RECURRENT, layer_idx, state_idx), recurrent_states)

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Return whether a layer has a state, that is, has seen a token."""
        return any((kind, layer_idx, state_idx) in self.by_place for kind in (_CONVOLUTION, _RECURRENT))

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002 - part of transformers' calling convention
        """Return whether states before the last are kept; always False."""
        return False

    def _keep(self, place: _Place, state: Tensor) -> Tensor:
        if place in self.by_place:
            self.by_place[place].copy_(state)  # in place: a stream's state is a part of a larger buffer
        else:
            self.by_place[place] = state.clone()
        return self.by_place[place]


class StreamStates(LayerStates):
    """States of streams: row r of a step has the states of slot r.

    ``starts`` has for each cache the states, of one row, with which its streams begin. At most ``streams`` streams are
    open and at most ``parked`` are parked at once. A step has at most ``rows`` rows; a row without a stream has states,
    too. If steps can be ``taken_back``, the states before the last step are kept beside those after it.
    """

    def __init__(
        self, starts: Sequence[LayerStates], streams: int, rows: int, parked: int, *, taken_back: bool = False
    ) -> None:
        super().__init__()
        self._starts, self._streams, self._spare = starts, streams, rows - streams
        self._versions = [
            {place: state.new_zeros((rows + parked, *state.shape[1:])) for place, state in starts[0].by_place.items()}
            for _ in range(2 if taken_back else 1)
        ]
        self.latest = 0  # the version with the states after the last step
        self._rows = 0

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the states."""
        return {buffer.device for buffer in self._versions[0].values()}

    def open(self, caches: Sequence[int]) -> None:
        """Give stream i, in slot i, the first states of cache ``caches[i]``; caches ascend."""
        first = 0
        for cache, streams in itertools.groupby(caches):
            last = first + len(list(streams))
            for place, buffer in self._versions[self.latest].items():
                buffer[first:last] = self._starts[cache].by_place[place]
            first = last

    def take(self, indices: Mapping[torch.device, Mapping[str, Tensor]], rows: int) -> None:
        """Copy the states that move to other slots, before a step of ``rows`` rows; ``indices`` is as for ``copy``."""
        self.copy(indices)
        self._rows = rows
        self.repeat()

    def copy(self, indices: Mapping[torch.device, Mapping[str, Tensor]], *, before: bool = False) -> None:
        """Copy states to other slots: those after the last step, or before it if ``before``.

        ``indices`` has for every device the slots from which ("source") and to which ("target") streams move, int64
        [copies] each. Parked streams have the same states in every version.
        """
        for place, buffer in self._versions[self.latest - before].items():
            moved = indices[buffer.device]
            if len(moved["source"]):
                source, target = (self._beyond_rows(moved[name]) for name in ("source", "target"))
                states = buffer[source]
                for version in self._versions:
                    version[place].index_copy_(0, target, states)

    def repeat(self) -> None:
        """Begin one more step of as many rows."""
        self.latest = (self.latest + 1) % len(self._versions)

    def take_back(self) -> None:
        """Return to the states before the last step."""
        self.repeat()  # there are two versions

    def arrange(self) -> None:
        """Hand the step's states to the layers, which change them in place."""
        after = self._versions[self.latest]
        for place, before in self._versions[self.latest - 1].items():
            self.by_place[place] = after[place][: self._rows]
            if before is not after[place]:
                self.by_place[place].copy_(before[: self._rows])

    def _beyond_rows(self, slots: Tensor) -> Tensor:
        """Return each slot's row in the buffers, where rows without a stream lie between open and parked streams."""
        return torch.where(slots >= self._streams, slots + self._spare, slots)


def layers_without_attention(config: Mapping[str, Any]) -> int:
    """Return the number of layers that have a state in place of entries."""
    return sum(kind in ("conv", "linear_attention") for kind in config.get("layer_types") or ())


def state_bytes(config: Mapping[str, Any], item_bytes: int) -> list[tuple[int, int]]:
    """Return for each kind of state how many layers have it, and the bytes of one layer's states of one stream.

    ``config`` are the contents of ``config.json``. ``item_bytes`` are the bytes of a number in the model's dtype, which
    is the dtype of a convolution's last inputs.
    """
    kinds = list(config.get("layer_types") or ())
    short = int(config["hidden_size"]) * int(config.get("conv_L_cache") or 0) * item_bytes if "conv" in kinds else 0
    mixers = int(config["num_hidden_layers"]) if config.get("model_type") == "falcon_h1" else 0
    return [
        (kinds.count("conv"), short),
        (kinds.count("linear_attention"), _delta_net(config, item_bytes)),
        (mixers, _mamba(config, item_bytes) if mixers else 0),
    ]


def _delta_net(config: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of the states of a layer with the gated delta rule (Qwen3-Next, Qwen3.5); 0 for other models."""
    if "linear_num_key_heads" not in config:
        return 0
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    heads = int(config["linear_num_value_heads"])
    channels = 2 * int(config["linear_num_key_heads"]) * key + heads * value
    return channels * int(config["linear_conv_kernel_dim"]) * item_bytes + heads * key * value * _RECURRENT_BYTES


def _mamba(config: Mapping[str, Any], item_bytes: int) -> int:
    """Return the bytes of the states of a layer of Falcon-H1, which has attention and a state-space mixer."""
    inner = config.get("mamba_d_ssm") or int(config["mamba_expand"] * config["hidden_size"])
    state = int(config["mamba_d_state"])
    channels = int(inner) + 2 * int(config["mamba_n_groups"]) * state
    return channels * int(config["mamba_d_conv"]) * item_bytes + int(inner) * state * _RECURRENT_BYTES
