"""A step of decoding with the weights of transformers' own modules, in ten operations a layer on a GPU.

A layer is computed here if its parts are known, whatever model it belongs to: ``trial`` finds them by watching
transformers, and proves each of them. A part that is not known is computed by its own module, the rest of the layer
here.

Of the ten operations four are matrix products. Queries, keys and values are one product over weights that are joined
in memory, and so are a gated MLP's first two products. The modules' own weights become views of the joined ones, so
that transformers prefills a prompt as before, and no weight is in memory twice. Two operations are attention
(``kvdrift.generator.attention.fused``). The others are norms, rotation and the MLP's activation (``operations``).

On a CPU weights stay separate, since packed weights have no views, and every operation is torch's own. A network is
computed here only if the bits are those of transformers' forward, which takes longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from kvdrift.generator.attention.fused import attention_fault
from kvdrift.generator.coupling.distributions import fused_fault
from kvdrift.generator.transformer.fused.operations import operations_fault
from kvdrift.generator.transformer.fused.parts import LAUNCHED, LINEAR, PLAIN, Step, begin, join
from kvdrift.generator.transformer.fused.trial import Parts, find_parts

if TYPE_CHECKING:
    from kvdrift.generator.attention.interface import LayerAttention
    from kvdrift.generator.attention.states import LayerStates


class FusedLayers:
    """The layers of a transformers network, made of the parts that ``known_parts`` returns.

    ``joined``: whether weights are joined in memory, and the operations of this folder replace transformers' own.
    """

    def __init__(self, network: Any, parts: Parts, *, joined: bool = True) -> None:
        if joined:
            join_weights(network)
        self._decoder, self._parts = network.model, parts
        self._operations = LAUNCHED if joined else PLAIN

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attention: LayerAttention, states: LayerStates | None = None
    ) -> Tensor:
        """Return the last hidden states of one new token per row, [rows, width], normed for the head.

        Tokens are int64 [rows], on the network's device; positions int64 [rows, 1], or [1, 1] if all rows have one
        position. ``attention`` is called with a layer's number among all layers. ``states`` are the rows' states of
        layers without attention, which the step replaces; None if all layers have attention.
        """
        parts, layers = self._parts, self._parts.layers
        residual = parts.embedded(self._decoder, tokens)
        angles = parts.angles(self._decoder, residual, positions)
        step = Step(self._operations, attention, states, positions, angles)
        normed = begin(residual, layers[0].before_mixer, step)
        for layer, following in zip(layers, [*(layer.before_mixer for layer in layers[1:]), parts.last], strict=True):
            normed = layer(residual, normed, following, step)
        return normed


def fused_layers(network: Any, fused: bool | None) -> FusedLayers | None:  # noqa: FBT001 - as in ``SharingOptions``
    """Return the network's fused layers; None if transformers' own forward is to be used.

    ``fused`` is that of ``SharingOptions``: True fuses on any device, False on none, None on CUDA. On a CPU, None gives
    layers that compute with torch's own operations.
    """
    device = next(network.parameters()).device
    joined = device.type == "cuda" or bool(fused)
    if fused is False or (device.type != "cpu" and not joined):
        return None
    parts = known_parts(network, joined=joined)
    return None if isinstance(parts, str) else FusedLayers(network, parts, joined=joined)


def layers_fault(network: Any) -> str | None:
    """Return why a network on CUDA is computed by transformers' own forward; None if its layers are fused."""
    parts = known_parts(network, joined=True)
    return parts if isinstance(parts, str) else None


_Found = tuple[list[ref[Any]], Parts | str]  # all modules and weights, and what was found of them
_found: WeakKeyDictionary[Any, dict[bool, _Found]] = WeakKeyDictionary()


def known_parts(network: Any, *, joined: bool) -> Parts | str:
    """Return the parts of a network's layers, or why they are not fused; they are tried once, unless a module changes.

    If not ``joined``, they have the bits of transformers' forward.
    """
    if (problem := layout_fault(network)) is not None:
        return problem
    device = next(network.parameters()).device
    if device.type == "cuda" and (problem := operations_fault(device)) is not None:
        return problem
    now = [*network.model.modules(), *network.model.parameters()]
    before, parts = _found.setdefault(network, {}).get(joined, ([], ""))
    if len(before) != len(now) or any(one() is not other for one, other in zip(before, now, strict=True)):
        parts = find_parts(network, exact=not joined)
        _found[network][joined] = [ref(one) for one in now], parts
    return parts


def layout_fault(network: Any) -> str | None:
    """Return what keeps a network from being tried, such as hooks; None if nothing does."""
    if len({parameter.device for parameter in network.parameters()}) > 1:
        return "the model's layers lie on several devices"
    if len({parameter.dtype for parameter in network.parameters()}) > 1:
        return "the model's weights are of several dtypes"
    for name, module in network.model.named_modules():
        if isinstance(module, nn.Linear) and type(module) not in LINEAR:
            return f"{name} is of class {type(module).__name__}"
        if _is_quantized(module):
            return f"{name} has quantized weights"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):  # noqa: SLF001
            return f"{name or 'the model'} has hooks"
    return None


def _is_quantized(module: nn.Module) -> bool:
    """Return whether a module holds matrices of integers; or, on CUDA, weights that a library's class cannot join."""
    weights = list(module.parameters(recurse=False))
    integers = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    if any(part.dim() > 1 and part.dtype in integers for part in (*weights, *module.buffers(recurse=False))):
        return True
    return any(weight.is_cuda and type(weight) is not nn.Parameter for weight in weights)


def join_weights(network: Any) -> None:
    """Join in memory those weights of each layer that multiply the same input; do nothing if they are joined."""
    parts = known_parts(network, joined=True)
    for layer in () if isinstance(parts, str) else parts.layers:
        if layer.mixer.known is not None:
            join(layer.mixer.module, layer.mixer.known.products)
        if layer.mlp.activation is not None:
            join(layer.mlp.module, layer.mlp.products)


def slower(network: Any, device: str) -> str | None:
    """Return a line with the reasons why decoding on a device is slower than it could be; None if there are none."""
    if torch.device(device).type != "cuda":
        return None
    reasons = {
        "distributions are compared from copies": fused_fault(torch.device(device)),
        "attention is computed cache by cache": attention_fault(torch.device(device)),
        "layers are computed as transformers computes them": layers_fault(network),
        "parts of layers are computed by their own modules": _own_parts(network),
    }
    listed = [f"{what} ({why})" for what, why in reasons.items() if why is not None]
    return f"decoding on {device} takes longer than it could: {'; '.join(listed)}" if listed else None


def _own_parts(network: Any) -> str | None:
    """Return the parts that their own modules compute although the layers are fused; None if there are none."""
    parts = known_parts(network, joined=True)
    return None if isinstance(parts, str) or not parts.own else ", ".join(parts.own_names())
