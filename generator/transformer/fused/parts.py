"""What a decoder layer consists of, and how each part computes one new token per row.

A layer adds the output of its mixer to the residual stream, and then the output of its MLP. The mixer is attention, or
what some layers have in its place, such as a convolution. Each of the two can have a norm before it, and a norm between
it and the sum; or both get the same normed input. A part whose arithmetic is not known is computed by the layer's own
module; everything around it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from kvdrift.generator.attention.cpu_products import OneDNNLinear, PackedLinear, replace_linear_layers
from kvdrift.generator.transformer.fused import operations

if TYPE_CHECKING:
    from kvdrift.generator.attention.interface import LayerAttention
    from kvdrift.generator.attention.states import LayerStates

JOINT = "joint_proj"  # the name of the layer with joined weights, in the module whose first products they are
LINEAR = {nn.Linear, OneDNNLinear, PackedLinear}


class Operations(NamedTuple):
    """The functions of ``operations`` by which parts compute; ``gated`` has those for gated MLPs, by activation."""

    add_norm: Callable[..., Tensor]
    add_normed: Callable[..., None]
    norm_columns: Callable[..., None]
    rotate: Callable[..., None]
    gated: Mapping[str, Callable[[Tensor], Tensor]]


LAUNCHED = Operations(
    operations.add_norm, operations.add_normed, operations.norm_columns, operations.rotate,
    {"silu": operations.silu_times, "gelu": operations.gelu_times},
)  # fmt: skip
"""One launch each on CUDA."""

PLAIN = Operations(
    operations.plain_add_norm, operations.plain_add_normed, operations.plain_norm_columns, operations.plain_rotate, {}
)
"""torch's own operations; gated MLPs are computed by their own modules."""


@dataclass(frozen=True)
class Step:
    """What all layers of a step share.

    ``angles`` has the results of the rotary embedding, cosines and sines [rows or 1, 1, turned]. ``positions`` are
    int64 [rows or 1, 1]. ``states`` are those of layers without attention, None if there are none.
    """

    operations: Operations
    attention: LayerAttention
    states: LayerStates | None
    positions: Tensor
    angles: Sequence[Any]
    flat: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def flat_angles(self, number: int, *, doubled: bool) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [rows or 1, turned]; ``doubled`` repeats them for the second half of channels."""
        if (number, doubled) not in self.flat:
            cos, sin = (angle.flatten(0, 1) for angle in self.angles[number])
            pair = (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if doubled else (cos, sin)
            self.flat[number, doubled] = pair
        return self.flat[number, doubled]


@dataclass(frozen=True)
class Norm:
    """A norm; ``style`` is one of ``operations.STYLES``, or None if only its own module knows its arithmetic."""

    module: Any
    epsilon: float = 0.0
    style: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x, [rows, width], normed by torch's own operations."""
        if self.style is None:
            result: Tensor = self.module(x)
            return result
        return operations.norm(x, self.module.weight, self.epsilon, self.style)

    def joins(self, other: Norm | None) -> bool:
        """Return whether one operation computes this norm and ``other``."""
        return self.style is not None and (other is None or (other.style, other.epsilon) == (self.style, self.epsilon))


@dataclass(frozen=True)
class Projections:
    """Attention of known arithmetic: products, norms of queries and keys, rotation by halves, and a last product.

    ``products`` are the linear layers of queries, keys and values, or one layer for all. ``norms`` are those of queries
    and keys, per head or, if ``whole``, over all heads. ``turn`` says which angles rotate queries and keys, and whether
    they are given for half of the channels; None for no rotation.
    """

    products: Sequence[nn.Linear]
    output: nn.Linear
    heads: int
    kv_heads: int
    size: int
    scaling: float
    norms: tuple[Norm, Norm] | None = None
    whole: bool = False
    turn: tuple[int, bool] | None = None

    def projected(self, module: Any, normed: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [rows, heads, 1, size], keys and values [rows, KV heads, 1, size]."""
        rows, size = len(normed), self.size
        products = product(module, self.products, normed)
        weights, epsilon, style = [None, None], 0.0, operations.ROUNDED
        if self.norms is not None:
            weights = [norm.module.weight for norm in self.norms]
            epsilon, style = self.norms[0].epsilon, self.norms[0].style or operations.ROUNDED
            if self.whole:
                for first, weight in zip((0, self.heads * size), weights, strict=True):
                    step.operations.norm_columns(products, first, weight, epsilon, style)
                weights = [None, None]
        projected = products.view(rows, -1, size)
        cos, sin = (None, None) if self.turn is None else step.flat_angles(self.turn[0], doubled=self.turn[1])
        if cos is not None or weights[0] is not None:
            step.operations.rotate(projected, cos, sin, self.heads, *weights, epsilon, style)
        # views of the products
        query, key, value = torch.split(projected[:, :, None], [self.heads, self.kv_heads, self.kv_heads], dim=1)
        return query, key, value


@dataclass(frozen=True)
class Mixer:
    """A layer's attention, or what the layer has in its place.

    ``layer`` is the layer's number among all layers if it has attention, else None. ``angles`` is the number of the
    rotary embedding's result that transformers hands to it; None if it gets none. ``states`` is the parameter by which
    it gets the states of layers without attention, and ``settings`` has its arguments that are not a step's. ``known``
    is None if its own module computes it.
    """

    module: Any
    layer: int | None
    angles: int | None
    states: str = "past_key_values"
    settings: Mapping[str, Any] = field(default_factory=dict)
    known: Projections | None = None

    def __call__(self, normed: Tensor, step: Step) -> Tensor:
        """Return the output of the mixer, [rows, width] -> [rows, width]."""
        if self.layer is None or self.known is None:
            named = {**self.settings, "attention_mask": None, self.states: step.states}
            if self.layer is not None:
                angles = None if self.angles is None else step.angles[self.angles]
                named |= {
                    "position_ids": step.positions, "position_embeddings": angles, "kvdrift_attention": step.attention
                }  # fmt: skip
            return of_module(self.module(hidden_states=normed[:, None], **named))
        heads = self.known.projected(self.module, normed, step)
        output = step.attention.attend(self.layer, *heads, self.known.scaling)
        added: Tensor = self.known.output(output.reshape(len(normed), -1))
        return added


@dataclass(frozen=True)
class MLP:
    """A layer's MLP, or what it has in its place.

    ``products`` are the linear layers of gate and up, or one layer for both, ``down`` is the last product, and
    ``activation`` names the gate's function; without it the own module computes all.
    """

    module: Any
    products: Sequence[nn.Linear] = ()
    down: Any = None
    activation: str | None = None

    def __call__(self, normed: Tensor, step: Step) -> Tensor:
        """Return the output, [rows, width] -> [rows, width]."""
        if self.activation is None:
            return of_module(self.module(normed[:, None]))
        gated = step.operations.gated[self.activation]
        added: Tensor = self.down(gated(product(self.module, self.products, normed)))
        return added


@dataclass(frozen=True)
class Layer:
    """The parts of a decoder layer; a norm that it lacks is None. Outputs are multiplied by ``factor`` before a sum.

    If ``parallel``, the MLP gets the mixer's input. ``scaled``, if not None, is the layer's own module, whose
    ``layer_scalar`` multiplies the residual stream at the end.
    """

    before_mixer: Norm | None
    mixer: Mixer
    after_mixer: Norm | None
    before_mlp: Norm | None
    mlp: MLP
    after_mlp: Norm | None
    factor: float = 1.0
    parallel: bool = False
    scaled: Any = None

    def __call__(self, residual: Tensor, normed: Tensor, following: Norm | None, step: Step) -> Tensor:
        """Add the layer's outputs to ``residual`` in place, [rows, width]; return the sum, normed by ``following``.

        ``normed`` is the residual as it is normed before the mixer.
        """
        mixed = self._add(residual, self.mixer(normed, step), self.after_mixer, self.before_mlp, step)
        added = self.mlp(normed if self.parallel else mixed, step)
        if self.scaled is None:
            return self._add(residual, added, self.after_mlp, following, step)
        self._add(residual, added, self.after_mlp, None, step)
        return begin(residual.mul_(self.scaled.layer_scalar), following, step)

    def _add(self, residual: Tensor, added: Tensor, after: Norm | None, following: Norm | None, step: Step) -> Tensor:
        """Add to ``residual`` in place what ``after`` makes of ``added``; return the sum as ``following`` norms it."""
        if self.factor != 1.0:
            added = added * self.factor
        if following is not None and following.joins(after):
            weight = None if after is None else after.module.weight
            return step.operations.add_norm(
                residual, added, following.module.weight, following.epsilon, following.style, weight
            )
        if after is not None and after.style is not None:
            step.operations.add_normed(residual, added, after.module.weight, after.epsilon, after.style)
        else:
            residual.add_(added if after is None else after(added))
        return begin(residual, following, step)


def begin(residual: Tensor, following: Norm | None, step: Step) -> Tensor:
    """Return ``residual``, [rows, width], as ``following`` norms it."""
    if following is None:
        return residual
    if following.style is None:
        return following(residual)
    return step.operations.add_norm(residual, None, following.module.weight, following.epsilon, following.style, None)


def product(module: Any, products: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Return the outputs of a module's linear layers side by side, [rows, in] -> [rows, all outs].

    The layer with their joined weights computes them, once ``join`` has made it.
    """
    if JOINT in module._modules:  # noqa: SLF001
        result: Tensor = module.joint_proj(x)
        return result
    parts = [layer(x) for layer in products]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def of_module(output: Any) -> Tensor:
    """Return hidden states [rows, width] of a module's output [rows, 1, width], or of the first of its outputs."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden[:, 0]


def join(module: Any, products: Sequence[nn.Linear]) -> None:
    """Join in memory the weights of several linear layers of a module with the same input, unless they are joined."""
    if len(products) > 1 and JOINT not in module._modules:  # noqa: SLF001
        module.add_module(JOINT, _joint(products))
        if module.joint_proj.weight.device.type == "cpu":
            replace_linear_layers(module)


def _joint(parts: Sequence[Any]) -> nn.Linear:
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
