"""The model's activation, computed so that a row does not depend on the rows beside it.

On a CPU, torch computes SiLU with vector instructions, except the last elements of each thread's share, which it
computes one by one and rounds differently in the last bit. Where those lie depends on how many rows there are. Its
exponential and its division have no such seam.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import SiLUActivation


class SeamlessSiLU(nn.Module):
    """x / (1 + exp(-x)), elementwise, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Activation of x, of any shape, in x's dtype."""
        wide = x.float()
        return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def replace_activations(network: nn.Module) -> None:
    """Put ``SeamlessSiLU`` in the place of every SiLU of the network."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, (nn.SiLU, SiLUActivation)):
                setattr(module, name, SeamlessSiLU())
