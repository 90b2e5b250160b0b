"""The settings of a side that kvdrift passes to llama.cpp, and their conditions for a model.

The library does not check one condition, which is checked here. Without flash attention it takes keys in blocks of 32
values, and silently computes something else for heads whose size is no multiple of 32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import EXACT_TYPES

CACHE_TYPES: Final = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
"""The types in which llama.cpp stores keys and values, with its number for each type."""

BYTES: Final = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes of a value, including its share of its block's scales."""

_BLOCK = 32  # values that a quantized type has one scale for
_ROWS, _MOST_ROWS = 32, 256


@dataclass(frozen=True)
class ContextSettings:
    """Settings of one side.

    Attributes:
        type_k: The type of stored keys, a key of ``CACHE_TYPES``.
        type_v: The type of stored values.
        flash_attention: Whether attention is computed in one pass over the cache.
        ubatch: The most tokens computed at once, of a prompt and of a step.
        threads: The number of threads that compute; 0 for one per processor, whose number units record.
        rows: The most streams that one call advances. From 64 on, flash attention uses other kernels, and a stream's
            logits depend on how many others are beside it.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    ubatch: int = 512
    threads: int = 0
    rows: int = _ROWS

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> ContextSettings:
        """Return the settings, with the values by name that a study file gives; ``where`` is for error lines."""
        known = {field.name: field.default for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InputError(f"{where}: unknown setting '{name}' of llama.cpp; {nearest(name, known)}")
            if type(value) is not type(known[name]):
                raise InputError(f"{where}: {name} = {value!r}: write a value like {known[name]!r}")
        made = cls(**given)
        for name in ("type_k", "type_v"):
            if (kind := getattr(made, name)) not in CACHE_TYPES:
                raise InputError(f"{where}: {name} = '{kind}': no cache type; write {', '.join(CACHE_TYPES)}")
        for name, least, most in (("ubatch", 1, 1 << 16), ("threads", 0, 512), ("rows", 1, _MOST_ROWS)):
            if not least <= getattr(made, name) <= most:
                raise InputError(f"{where}: {name} = {getattr(made, name)}: write {least} to {most}")
        if made.type_v not in EXACT_TYPES and not made.flash_attention:
            raise InputError(f"{where}: type_v = '{made.type_v}': quantized values need flash_attention = true")
        return cls(**{**asdict(made), "threads": made.threads or len(os.sched_getaffinity(0))})

    @property
    def asked(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The settings as text for an error line."""
        return ", ".join(f"{name} = {value}" for name, value in self.asked.items())

    def check_heads(self, key_size: int, value_size: int, where: str) -> None:
        """Raise an error if a quantized type's blocks do not divide the heads."""
        for name, kind, size in (("type_k", self.type_k, key_size), ("type_v", self.type_v, value_size)):
            if kind not in EXACT_TYPES and size % _BLOCK:
                raise InputError(
                    f"{where}: {name} = '{kind}': stores blocks of {_BLOCK} values, and the model's heads have "
                    f"{size}; llama.cpp would compute something else without a word; choose {', '.join(EXACT_TYPES)}"
                )
