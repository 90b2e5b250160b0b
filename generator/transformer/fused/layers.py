"""A step of decoding with the weights of transformers' own modules, in ten operations a layer on a GPU.

Four operations are matrix products. Queries, keys and values are one product over weights that are joined in memory,
and so are the MLP's first two products. The modules' own weights become views of the joined ones, so that transformers
prefills a prompt as before, and no weight is in memory twice.

Two operations are attention (``kvdrift.generator.attention.fused``). The others are norms, rotation and the MLP's
activation. On CUDA each of the others is one launch of ``kvdrift.generator.transformer.fused.triton_kernels``.
Elsewhere torch computes them as transformers does, with the same roundings: norms in float32 and then in the weights'
dtype, everything else in the weights' dtype.

On a CPU weights stay separate, since packed weights have no views, and every operation is torch's own; the bits are
those of transformers' forward, which takes longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from kvdrift.generator.attention.cpu_products import OneDNNLinear, PackedLinear, SeamlessSiLU, replace_linear_layers
from kvdrift.generator.attention.fused import attention_fault
from kvdrift.generator.coupling.distributions import fused_fault
from kvdrift.generator.transformer.files.configuration import library
from kvdrift.generator.transformer.files.local_folders import ARCHITECTURES
from kvdrift.schema.errors import tried_once


@tried_once
def operations_fault(device: torch.device) -> str | None:
    """Return why this module's operations cannot be launched on a CUDA device; None if they can.

    They are tried once, on a few small rows. Triton builds a kernel at its first use, which needs a C compiler on this
    machine.
    """
    near = all(
        torch.allclose(result.cpu(), expected, atol=1e-5)
        for result, expected in zip(_tried(device), _tried(), strict=True)
    )
    return None if near else "the Triton kernels give wrong values"


def _tried(device: torch.device | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, added, weights, cos, sin = (torch.randn(2, 6, generator=generator).to(device) for _ in range(5))
    heads = torch.randn(2, 4, 6, generator=generator).to(device)
    results = [silu_times(x), add_norm(x, added, weights[0], 1e-6), x]
    rotate(heads, cos, sin, 2, weights[0], weights[1], 1e-6)
    return [*results, heads]


def plain_add_norm(residual: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``added`` to ``residual`` in place, and return the RMSNorm of the sum, [rows, width].

    Both are [rows, width], contiguous; None adds nothing. ``weight`` is [width]; ``epsilon`` is added to the mean
    square.
    """
    if added is not None:
        residual.add_(added)
    return _norm(residual, weight, epsilon)


def plain_rotate(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
) -> None:
    """Apply RMSNorm to queries and to keys, if they have weights [size] for it, and rotate them by RoPE, in place.

    ``projected`` are queries, keys and values, [rows, heads + 2 KV heads, size], contiguous; ``cos`` and ``sin`` are
    [rows, size], or [1, size] if all rows have one position. ``epsilon`` is added to the mean square.
    """
    kv_heads = (projected.shape[1] - heads) // 2
    for part, weight in ((projected[:, :heads], query_weight), (projected[:, heads : heads + kv_heads], key_weight)):
        turned = part if weight is None else _norm(part, weight, epsilon)
        low, high = turned.chunk(2, dim=-1)
        part.copy_(turned * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None])


@custom_op("kvdrift::silu_times", mutates_args=())
def silu_times(projected: Tensor) -> Tensor:
    """Return SiLU of the first half of the columns, times the second half: [rows, 2 x inner] -> [rows, inner]."""
    gate, up = projected.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(gate.dtype) * up


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


add_norm = custom_op("kvdrift::add_norm", plain_add_norm, mutates_args=("residual",))
rotate = custom_op("kvdrift::rotate", plain_rotate, mutates_args=("projected",))


def _launch_on_cuda(name: str) -> Any:
    def launch(*arguments: Any) -> Any:
        from kvdrift.generator.transformer.fused import triton_kernels  # noqa: PLC0415 - Triton comes with CUDA only

        return getattr(triton_kernels, name)(*arguments)

    return launch


for name, operation in {"add_norm": add_norm, "rotate": rotate, "silu_times": silu_times}.items():
    operation.register_kernel("cuda")(_launch_on_cuda(name))


if TYPE_CHECKING:
    from kvdrift.generator.attention.interface import LayerAttention


_JOINED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_JOINT = "joint_proj"  # the name of the layer with the joined weights, in the same module


class FusedLayers:
    """The layers of a transformers network for which ``layout_fault`` returns None.

    ``joined``: whether weights are joined in memory, and this module's operations replace transformers' own.
    """

    def __init__(self, network: Any, *, joined: bool = True) -> None:
        if joined:
            join_weights(network)
        self._decoder, self._joined = network.model, joined
        self._add_norm: Any = add_norm if joined else plain_add_norm
        self._rotate: Any = rotate if joined else plain_rotate

    def hidden_states(self, tokens: Tensor, positions: Tensor, attention: LayerAttention) -> Tensor:
        """Return the last hidden states of one new token per row, [rows, width], normed for the head.

        Tokens are int64 [rows], on the network's device; positions int64 [rows, 1], or [1, 1] if all rows have one
        position.
        """
        decoder = self._decoder
        residual = decoder.embed_tokens(tokens)
        cos, sin = (angle.flatten(0, 1) for angle in decoder.rotary_emb(residual, positions))
        norms = [layer.input_layernorm for layer in decoder.layers] + [decoder.norm]
        normed: Tensor = self._add_norm(residual, None, norms[0].weight, norms[0].variance_epsilon)
        for layer, norm in zip(decoder.layers, norms[1:], strict=True):
            added = self._attend(layer.self_attn, normed, cos, sin, attention)
            between = layer.post_attention_layernorm
            normed = self._add_norm(residual, added, between.weight, between.variance_epsilon)
            mlp = layer.mlp
            added = mlp.down_proj(silu_times(mlp.joint_proj(normed))) if self._joined else mlp(normed)
            normed = self._add_norm(residual, added, norm.weight, norm.variance_epsilon)
        return normed

    def _attend(self, module: Any, normed: Tensor, cos: Tensor, sin: Tensor, attention: LayerAttention) -> Tensor:
        """Return the output of a layer's attention block, [rows, width] -> [rows, width]."""
        rows, size = len(normed), module.head_dim
        heads, kv_heads = module.q_proj.out_features // size, module.k_proj.out_features // size
        weights, epsilon = (None, None), 0.0
        if hasattr(module, "q_norm"):
            weights, epsilon = (module.q_norm.weight, module.k_norm.weight), module.q_norm.variance_epsilon
        if self._joined:
            products = module.joint_proj(normed)
        else:
            products = torch.cat([getattr(module, name)(normed) for name in _JOINED["self_attn"]], -1)
        projected = products.view(rows, -1, size)
        self._rotate(projected, cos, sin, heads, *weights, epsilon)
        # [rows, heads, 1, size], views of the products
        query, key, value = torch.split(projected[:, :, None], [heads, kv_heads, kv_heads], dim=1)
        output = attention.attend(module.layer_idx, query, key, value, module.scaling)
        added: Tensor = module.o_proj(output.reshape(rows, -1))
        return added


def fused_layers(network: Any, fused: bool | None) -> FusedLayers | None:  # noqa: FBT001 - as in ``SharingOptions``
    """Return the network's fused layers; None if transformers' own forward is to be used.

    ``fused`` is that of ``SharingOptions``: True fuses on any device, False on none, None on CUDA. On a CPU, None gives
    layers that compute with torch's own operations.
    """
    if fused is False:
        return None
    device = next(network.parameters()).device.type
    problem = layers_fault(network) if device == "cuda" else layout_fault(network)
    if problem is not None or (device not in ("cpu", "cuda") and not fused):
        return None
    return FusedLayers(network, joined=device == "cuda" or bool(fused))


def layers_fault(network: Any) -> str | None:
    """Return why a network on CUDA is computed by transformers' own forward; None if its layers are fused."""
    return layout_fault(network) or operations_fault(next(network.parameters()).device)


def layout_fault(network: Any) -> str | None:
    """Return why the layers of a network cannot be fused; None if they are as transformers makes them."""
    kind = network.config.model_type
    module_name = f"transformers.models.{kind}.modeling_{kind}"
    if kind not in ARCHITECTURES.values():
        return f"the model's type is {kind}"
    if len({parameter.device for parameter in network.parameters()}) > 1:
        return "the model's layers lie on several devices"
    if len({parameter.dtype for parameter in network.parameters()}) > 1:
        return "the model's weights are of several dtypes"
    known = {nn.Linear, OneDNNLinear, PackedLinear, nn.Embedding, nn.ModuleList, nn.SiLU, SeamlessSiLU}
    known.add(library().activations.SiLUActivation)
    for name, module in network.model.named_modules():
        if type(module) not in known and type(module).__module__ != module_name:
            return f"{name} is of class {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):  # noqa: SLF001
            return f"{name or 'the model'} has hooks"
    return None


def join_weights(network: Any) -> None:
    """Join in memory those weights of each layer that multiply the same input; do nothing if they are joined."""
    for layer in network.model.layers:
        for place, names in _JOINED.items():
            module = layer.get_submodule(place)
            if not hasattr(module, _JOINT):
                module.add_module(_JOINT, _joint([module.get_submodule(name) for name in names]))
                if module.joint_proj.weight.device.type == "cpu":
                    replace_linear_layers(module)


def _joint(parts: list[Any]) -> nn.Linear:
    """Return one linear layer in place of several with the same input; their weights become views of its weights."""
    joint = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), device="meta")
    for name in ("weight", "bias"):
        whole = None
        if getattr(parts[0], name) is not None:
            whole = nn.Parameter(torch.cat([getattr(part, name) for part in parts]), requires_grad=False)
            for part, rows in zip(parts, torch.split(whole, [part.out_features for part in parts]), strict=True):
                if not isinstance(part, PackedLinear):  # on a CPU, where only tests join weights
                    setattr(part, name, nn.Parameter(rows, requires_grad=False))
        setattr(joint, name, whole)
    return joint


def slower(network: Any, device: str) -> str | None:
    """Return a line with the reasons why decoding on a device is slower than it could be; None if there are none."""
    if torch.device(device).type != "cuda":
        return None
    reasons = {
        "distributions are compared from copies": fused_fault(torch.device(device)),
        "attention is computed cache by cache": attention_fault(torch.device(device)),
        "layers are computed as transformers computes them": layers_fault(network),
    }
    listed = [f"{what} ({why})" for what, why in reasons.items() if why is not None]
    return f"decoding on {device} takes longer than it could: {'; '.join(listed)}" if listed else None
