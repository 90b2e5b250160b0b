"""One step of a softmax over entries that come in several parts, for the Triton kernels of both operations."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton's front end evaluates annotations, and knows no others than its own.
@triton.jit  # type: ignore[untyped-decorator]
def attend_entries(  # type: ignore[no-untyped-def] # noqa: ANN201
    query, key, value, entry, present, place, inside, top, total, sums, scale, SIZE: tl.constexpr
):
    """Attend to some more entries, and return ``top``, ``total`` and ``sums``.

    ``top`` is the largest score so far, to base 2; ``total`` is the sum of weights relative to it; ``sums`` is the sum
    of weighted values. Only entries that are ``present`` count, and only places of a head that are ``inside``.
    """
    where = entry[:, None] * SIZE + place[None, :]
    read = present[:, None] & inside[None, :]
    # Heads and entries begin at multiples of 16 bytes, which Triton cannot see.
    k = tl.load(tl.multiple_of(key + where, [1, 16]), mask=read, other=0.0)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(present[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    v = tl.load(tl.multiple_of(value + where, [1, 16]), mask=read, other=0.0)
    sums = tl.dot(weights.to(query.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), sums
