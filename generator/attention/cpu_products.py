"""Linear layers and activations for CPUs, in place of torch's.

torch computes float32 matrix products by MKL, which reaches half of the possible speed on processors other than Intel's
and rounds products of few rows differently. oneDNN, which torch has too, does neither: from two rows on, a row's
product has the same bits whatever the number of rows, and whether the weights were packed before or are packed in the
call.

torch computes SiLU with vector instructions, except the last elements of each thread's share, which it computes one by
one and rounds differently in the last bit. Which elements these are depends on the number of rows. torch's exponential
and division do not have this fault.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_SMALLEST = 2**16  # weights; with fewer of them calling oneDNN takes longer than it saves
_PACKED_FOR = 16  # rows; oneDNN lays weights out in the same way for other numbers


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b by oneDNN on a CPU: float32 [..., in] -> [..., out].

    The weight is float32 [out, in], in any layout, or as ``packed`` returns it; the bias is float32 [out], or None.
    """
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return output


def packed(weight: Tensor) -> Tensor:
    """Return a weight, float32 [out, in] on a CPU, in the layout that oneDNN reads, for many products.

    ``to_dense`` of the result gives the weight back.
    """
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)  # noqa: SLF001
    return layout


def has_product() -> bool:
    """Return whether torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def fits_onednn(tensor: Tensor) -> bool:
    """Return whether oneDNN can multiply a tensor: float32 on a CPU, and torch has oneDNN."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and has_product()


class OneDNNLinear(nn.Linear):
    """A linear layer that shares the weights of another linear layer and multiplies by oneDNN."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's
        """Return the layer's output: [..., in] -> [..., out]."""
        return product(input, self.weight, self.bias)


class PackedLinear(OneDNNLinear):
    """A linear layer with another layer's weights, packed; the other layer's own weights can then be freed."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.packed = nn.Parameter(packed(layer.weight), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights [out, in], unpacked anew at each access."""
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's
        """Return the layer's output: [..., in] -> [..., out]."""
        return product(input, self.packed, self.bias)


class SeamlessSiLU(nn.Module):
    """x / (1 + exp(-x)), elementwise, in float32: a row's values do not depend on the rows beside it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x, of any shape, in x's dtype."""
        wide = x.float()
        divisor = wide.neg().exp_().add_(1.0)
        return torch.div(wide, divisor, out=divisor).to(x.dtype)


class SeamlessGELU(nn.Module):
    """x / (1 + exp(-2 z)) with z = sqrt(2 / pi) (x + .044715 x^3): GELU by its approximation with tanh, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x, of any shape, in x's dtype."""
        wide = x.float()
        inner = (wide * wide).mul_(0.044715).add_(1.0).mul_(wide).mul_(-2.0 * math.sqrt(2.0 / math.pi))
        return (wide / inner.exp_().add_(1.0)).to(x.dtype)


def replace_linear_layers(network: nn.Module) -> None:
    """Replace the network's large float32 linear layers by layers that multiply by oneDNN, if torch has oneDNN.

    Weights are packed, and the unpacked ones are freed, layer by layer. A head that shares the embedding's weights
    keeps them as they are: packed, they would take memory twice. A layer with quantized weights stays.
    """
    if not has_product():
        return
    tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    for module, name in _children(network):
        child = getattr(module, name)
        if not isinstance(child, nn.Linear) or child.weight.dtype != torch.float32:
            continue
        # A parameter of a library's own class holds quantized weights.
        if type(child.weight) is nn.Parameter and child.weight.numel() >= _SMALLEST:
            setattr(module, name, (OneDNNLinear if id(child.weight) in tables else PackedLinear)(child))


def replace_activations(network: nn.Module) -> None:
    """Replace every SiLU of the network by ``SeamlessSiLU``, and every GELU by tanh by ``SeamlessGELU``."""
    from transformers.activations import GELUTanh, SiLUActivation  # noqa: PLC0415 - products are computed without transformers

    for module, name in _children(network):
        child = getattr(module, name)
        if isinstance(child, (nn.SiLU, SiLUActivation)):
            setattr(module, name, SeamlessSiLU())
        elif isinstance(child, GELUTanh):
            setattr(module, name, SeamlessGELU())


def _children(network: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the place of each module of the network: its parent and its name there."""
    return [(module, name) for module in network.modules() for name, _ in module.named_children()]
