"""Terms of a layer's attention besides a softmax over all earlier positions: a window, a soft cap, sinks.

With scaled products s of a query and its keys, a soft cap c makes them c tanh(s / c). A window of W lets the query at
position t see only the positions t - W + 1 .. t. Sinks are one learned number for each head. It joins the sum of
exponentials once and has no value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import fits_onednn, product

_POSITIONS = 128  # of queries of a prompt, whose scores are computed at once


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """The terms of a layer: a window W, a soft cap c, and sinks [heads]; each is None if the layer does not have it."""

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the layer has none of these terms."""
        return self.window is None and self.softcap is None and self.sinks is None

    def first_seen(self, entries: int) -> int:
        """Return the place of the first entry that a query sees, among ``entries`` up to its own."""
        return 0 if self.window is None else max(entries - self.window, 0)

    def held(self, entries: int) -> int:
        """Return how many of ``entries`` a later query may still see, which is how many a cache holds."""
        return entries if self.window is None else min(entries, self.window - 1)


PLAIN = LayerTerms()


def attend_capped(query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Attend with a soft cap from queries [..., T, size] to keys and values [..., S, size].

    Returns the output [..., T, size], float32, and the logarithm of the sum of exponentials, float32 [..., T].
    """
    if query.dim() == 3 and fits_onednn(query):
        heads = zip(query, key, value, strict=True)
        found = [_weigh(_scores(some, keys, scaling, softcap), values) for some, keys, values in heads]
        output, mass = (torch.stack(part) for part in zip(*found, strict=True))
        return output, mass
    return _weigh(_scores(query, key, scaling, softcap), value)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Apply a soft cap to scores; None leaves them unchanged. An element's result does not depend on its place.

    tanh(x) is computed as 1 - 2 / (1 + exp(2 x)), since torch's own tanh computes a tensor's last elements differently.
    """
    if softcap is None:
        return scores
    return softcap - 2.0 * softcap / (1.0 + (scores * (2.0 / softcap)).exp())


def with_sinks(output: Tensor, mass: Tensor, sinks: Tensor | None) -> Tensor:
    """Add sinks [heads] to the sums of exponentials of an attention output, [..., KV heads, query heads, size].

    ``mass`` is the logarithm of the sum of exponentials over all parts, float32 [..., KV heads, query heads of it].
    """
    if sinks is None:
        return output
    return output * _beside(mass, sinks.view(mass.shape[-2:]))[..., None]


def attend_causally_by(query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: LayerTerms) -> Tensor:
    """Attend causally in a layer with terms, from the last T of S positions; return [1, heads, T, size].

    Queries are [1, heads, T, size], keys and values [KV heads, S, size].
    """
    _, heads, length, size = query.shape
    kv_heads, positions, _ = key.shape
    group, before = heads // kv_heads, positions - length
    grouped = query.reshape(kv_heads, group, length, size)
    output = torch.empty_like(grouped)
    for first in range(0, length, _POSITIONS):
        last = min(first + _POSITIONS, length)
        since = terms.first_seen(before + first + 1)
        own = torch.arange(before + first, before + last, device=key.device)[:, None]
        seen = torch.arange(since, before + last, device=key.device)
        hidden = seen > own
        if terms.window is not None:
            hidden |= seen <= own - terms.window
        for head in range(kv_heads):
            rows = grouped[head, :, first:last].reshape(-1, size)
            keys, values = key[head, since : before + last], value[head, since : before + last]
            scores = _scores(rows, keys, scaling, terms.softcap)
            scores.view(group, last - first, -1).masked_fill_(hidden, -torch.inf)
            part, mass = _weigh(scores, values)
            if terms.sinks is not None:
                sinks = terms.sinks.view(kv_heads, group)[head].repeat_interleave(last - first)
                part = part * _beside(mass, sinks)[:, None]
            output[head, :, first:last] = part.view(group, last - first, size)
    return output.view(query.shape)


def _beside(mass: Tensor, sinks: Tensor) -> Tensor:
    """Return the keys' share of a sum of exponentials that includes a sink, from the logarithm of the keys' own sum."""
    return 1.0 / (1.0 + (sinks.float() - mass).exp())


def _scores(query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return scores of queries [..., T, size] and keys [..., S, size], float32 [..., T, S]."""
    if query.dim() == 2 and fits_onednn(query):
        return capped(product(query * scaling, key), softcap)
    return capped((query @ key.transpose(-1, -2)).float() * scaling, softcap)


def _weigh(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Average values [..., S, size] with the softmax of float32 scores [..., T, S] as weights.

    Returns the averages [..., T, size] and the logarithms of the sums of exponentials [..., T]; both float32.
    """
    top = scores.amax(-1)
    weights = torch.softmax(scores, -1)
    mass = top - weights.amax(-1).log()
    if weights.dim() == 2 and fits_onednn(weights) and value.dtype == torch.float32:
        return product(weights, value.t()), mass
    return (weights.to(value.dtype) @ value).float(), mass
