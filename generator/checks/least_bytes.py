"""A lower bound on the bytes that a codec needs, by Shannon's rate-distortion bound.

Independent numbers drawn from the normal law of variance 1 cannot be read back with a mean square error D from fewer
than max(0, -log2(D) / 2) bits a number, whatever the code (Shannon 1959; Cover and Thomas, Elements of Information
Theory, theorem 10.3.2). If some numbers are read back better than others, such as an exact window, the bound holds for
each set of numbers with its own D, and the bits of all sets add up. Rounding to the model's dtype counts as error, so a
codec that returns its input needs about 26 bits a number in float32 and 10 in bfloat16, not infinitely many.

The bound holds for every codec, and is far from tight: scales, zero points and a window's exact numbers cost more than
the bound counts, and integers of equal steps are not the best code. So it finds impossible claims, not slightly wrong
ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import DTYPES, StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer

_DRAWS = 8
_ALLOWANCE = 0.05  # bits a number: errors are means over hundreds of numbers, which are off by chance


def bits_claimed_and_needed(
    hold: Callable[[PrefixLayer], PrefixLayer], stored_bytes: Callable[[PrefixLayer], StoredBytes],
    heads: int, entries: int, size: int, dtype: str,
) -> tuple[float, float]:  # fmt: skip
    """Return how many bits a number a codec claims to store, and how many it needs at least.

    ``hold`` returns the layer that attention reads in a layer's place, and ``stored_bytes`` the bytes that the codec
    claims for a layer. Tried layers have some KV heads, entries, and channels of a head, in a model's dtype.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(_DRAWS, 2, heads, entries, size, generator=generator, dtype=torch.float64)
    squares = torch.empty_like(numbers)
    for drawn, square in zip(numbers, squares, strict=True):
        layer = PrefixLayer(*drawn.to(DTYPES[dtype]))
        back = hold(layer)
        square[0], square[1] = (back.key.double() - drawn[0]).square(), (back.value.double() - drawn[1]).square()
    needed = max(_bits(squares.mean((0, 2, 4))), _bits(squares.mean((0, 2, 3))))  # sets of an entry, or of a channel
    return 8 * stored_bytes(layer).total / (2 * heads * entries * size), max(needed - _ALLOWANCE, 0)


def _bits(errors: Tensor) -> float:
    """Return the mean bits a number of equally large sets of numbers, from their mean square errors."""
    least = torch.finfo(torch.float64).tiny  # of a set that comes back as it was drawn
    return float((-0.5 * errors.clamp(least, 1).log2()).mean())
