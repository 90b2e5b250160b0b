"""Float32 matrix products on a CPU by oneDNN, which torch has beside MKL.

torch takes MKL for them, which uses half of what processors other than Intel's can do, and rounds differently for few
rows. oneDNN does neither.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SMALLEST = 2**16  # weights; with fewer of them the call takes longer than it saves


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b of float32 matrices on a CPU: x [..., in], weight [out, in] in any layout -> [..., out]."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return output


def has_product() -> bool:
    """Whether torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class OneDNNLinear(nn.Linear):
    """A linear layer, with the weights of another, whose product is oneDNN's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's
        """[..., in] -> [..., out]."""
        return product(input, self.weight, self.bias)


def replace_linear_layers(network: nn.Module) -> None:
    """Put ``OneDNNLinear`` in the place of a network's large float32 linear layers on a CPU, if there is oneDNN."""
    if not has_product():
        return
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and _gains(child.weight):
                setattr(module, name, OneDNNLinear(child))


def _gains(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.numel() >= _SMALLEST
