"""Say why decoding on a GPU is slower than it could be."""

from __future__ import annotations

from typing import Any

import torch

from generator.attention.fused.attention import attention_fault
from generator.coupling.fused_draws import fused_fault
from generator.transformer.fused.layers import layers_fault


def slower(network: Any, device: str) -> str | None:
    """Return a line that says why decoding on a device is slower than it could be; None if it is not.

    Args:
        network: A transformers causal language model, on the device.
        device: The device, as torch names it.
    """
    if torch.device(device).type != "cuda":
        return None
    reasons = {
        "laws are compared from copies": fused_fault(torch.device(device)),
        "attention is computed cache by cache": attention_fault(torch.device(device)),
        "layers are computed as transformers computes them": layers_fault(network),
    }
    said = [f"{what} ({why})" for what, why in reasons.items() if why is not None]
    return f"decoding on {device} takes longer than it could: {'; '.join(said)}" if said else None
