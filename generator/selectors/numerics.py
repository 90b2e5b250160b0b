"""The noise floor: the whole prompt cache, computed another way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvdrift.generator.attention.holding import DTYPES, AsComputed, Holding, InDtype
from kvdrift.generator.selectors.full import Full
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.schema.errors import InputError, nearest

_OWN = "model"  # the dtype that the model computes in


@dataclass(frozen=True)
class Numerics(Full):
    """Keeps all n prompt entries, which are computed or read in another way than the reference's.

    They are prefilled in other chunks, held in another dtype, or read by more or fewer streams at once. Nothing is
    evicted, so any divergence is rounding that an uncompressed deployment has too (``docs/selectors.md``).
    """

    summary: ClassVar[str] = "every prompt entry, computed another way (the noise floor)"
    prefill_chunk: int = 256
    cache_dtype: str = _OWN
    row_tile: int = 0

    def __post_init__(self) -> None:
        at_least(1, prefill_chunk=self.prefill_chunk)
        at_least(0, row_tile=self.row_tile)
        if self.cache_dtype not in (known := (_OWN, *DTYPES)):
            raise InputError(f"cache_dtype = '{self.cache_dtype}': {nearest(self.cache_dtype, known)}")

    @property
    def holding(self) -> Holding:
        """The storage of entries: rounded to ``cache_dtype``, or as the model computed them."""
        return AsComputed() if self.cache_dtype == _OWN else InDtype(self.cache_dtype)
