"""Next-token distributions from last hidden states: the head's product, and a softmax or the study's sampling.

On a GPU a row of logits is padded to a multiple of 16 bytes with logits of minus infinity, whose probabilities are
exactly 0. Otherwise rows would begin at different places within the 16 bytes that are read at once, and a softmax would
sum each row in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import has_product, product
from kvdrift.generator.attention.parts import capped
from kvdrift.generator.coupling.distributions import softmax
from kvdrift.generator.coupling.sampling import deployed
from kvdrift.generator.transformer.memory import DOUBLE_VOCABULARY, padded_vocabulary
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling

_ROWS = 256  # of logits that a CPU computes at once: more do not fit its cache
_TOKENS = 8192  # of the vocabulary whose weights are converted to float32 at once


class Head:
    """The head of a network, with the sampling of its logits; hidden states and distributions are on ``device``.

    ``logits_dtype`` is "float32", or None for the weights' dtype, to which logits are then rounded.
    """

    def __init__(
        self, network: Any, device: str, logits_dtype: str | None = None, sampling: Sampling = FULL_SOFTMAX
    ) -> None:
        self._layer, self._device = network.lm_head, torch.device(device)
        self._vocabulary, self._dtype = self._layer.out_features, next(self._layer.parameters()).dtype
        self._wide, self._sampling = logits_dtype == "float32", sampling
        self._scaling, self._softcap = _logit_terms(network)

    def room(self, rows: int) -> Tensor:
        """Return an uninitialized array for distributions, [rows, padded V]: float32 for a large V, else float64."""
        dtype = torch.float64 if self._vocabulary <= DOUBLE_VOCABULARY else torch.float32
        return torch.empty((rows, self._columns), dtype=dtype, device=self._device)

    def distributions(self, hidden: Tensor, room: Tensor) -> Tensor:
        """Compute distributions, [rows, V], from last hidden states [rows, width], in an array of ``Head.room``."""
        # On other devices than a CPU, products of other numbers of rows may round differently: all rows go together.
        at_once = _ROWS if self._device.type == "cpu" else len(hidden)
        for rows, probabilities in zip(torch.split(hidden, at_once), torch.split(room, at_once), strict=True):
            logits = self._logits(rows).to(self._device)
            if self._sampling == FULL_SOFTMAX:
                softmax(logits, probabilities)
            else:
                deployed(logits, self._sampling, probabilities)
        return room[:, : self._vocabulary]

    @property
    def _columns(self) -> int:
        return self._vocabulary if self._device.type == "cpu" else padded_vocabulary(self._vocabulary)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, columns], on the head's device."""
        wide = self._wide and self._dtype != torch.float32
        if self._device.type == "cpu" and not wide:
            layer_logits: Tensor = self._layer(hidden)
            return self._on_logits(layer_logits)
        weight = self._layer.weight
        hidden = hidden.to(weight.device)
        logits = hidden.new_empty((len(hidden), self._columns), dtype=torch.float32 if wide else self._dtype)
        inside, beyond = logits[:, : self._vocabulary], logits[:, self._vocabulary :]
        beyond.fill_(-torch.inf)
        if not wide:
            torch.mm(hidden, weight.t(), out=inside)
        elif weight.is_cuda:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=inside)
        else:
            _wide_product(hidden.float(), weight, inside)
        if self._scaling != 1.0 or self._softcap is not None:
            inside.copy_(self._on_logits(inside))
        return logits

    def _on_logits(self, logits: Tensor) -> Tensor:
        if self._scaling != 1.0:
            logits = logits * self._scaling
        if self._softcap is None:
            return logits
        return capped(logits.float(), self._softcap).to(logits.dtype)  # in 16 bits its sum would cancel small logits


def _logit_terms(network: Any) -> tuple[float, float | None]:
    """Return the factor of a network's logits, and their soft cap; 1 and None for most networks."""
    config = network.config
    times, divisor = (
        float(next((factor for name in names if (factor := getattr(config, name, None))), 1.0))
        for names in (("logit_scale", "lm_head_multiplier"), ("logits_scaling",))
    )
    return times / divisor, getattr(config, "final_logit_softcapping", None)


def _wide_product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the product of float32 [rows, width] and 16-bit weights [V, width] into ``out``, float32 [rows, V]."""
    by_onednn = hidden.device.type == "cpu" and has_product()
    for part, columns in zip(torch.split(weight, _TOKENS), torch.split(out, _TOKENS, dim=1), strict=True):
        columns.copy_(product(hidden, part.float()) if by_onednn else hidden @ part.float().t())
