"""Selectors choose which prompt entries each KV head keeps; every file has one selector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvdrift.generator.selectors.expected_attention import ExpectedAttention
from kvdrift.generator.selectors.full import Full
from kvdrift.generator.selectors.h2o import H2O
from kvdrift.generator.selectors.keydiff import KeyDiff
from kvdrift.generator.selectors.knorm import Knorm
from kvdrift.generator.selectors.kvpress import PREFIX, build_kvpress
from kvdrift.generator.selectors.numerics import Numerics
from kvdrift.generator.selectors.own.building import build, check_statistics
from kvdrift.generator.selectors.own.classes import default_parameters
from kvdrift.generator.selectors.own.kinds import SELECTOR_KIND
from kvdrift.generator.selectors.parameters import Value
from kvdrift.generator.selectors.pyramidkv import PyramidKV
from kvdrift.generator.selectors.random_entries import RandomEntries
from kvdrift.generator.selectors.recent import Recent
from kvdrift.generator.selectors.selector import ScoringSelector, Selector
from kvdrift.generator.selectors.snapkv import SnapKV
from kvdrift.generator.selectors.tova import TOVA
from kvdrift.schema.errors import InputError

SELECTORS: dict[str, type[Selector]] = {
    "full": Full,
    "numerics": Numerics,
    "recent": Recent,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "h2o": H2O,
    "tova": TOVA,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "expected_attention": ExpectedAttention,
    "random": RandomEntries,
}

# What takes memory or time with each position, whatever the prompt: more of them than any model reads is a mistake.
_POSITIONS = ("future_positions", "kernel")
_MOST_POSITIONS = 2**20

__all__ = [
    "SELECTORS", "Full", "Numerics", "Recent", "ScoringSelector", "Selector", "SnapKV", "build_selector",
    "default_parameters",
]  # fmt: skip


def build_selector(name: str, parameters: Mapping[str, Value], folder: Path | None = None) -> Selector:
    """Make a selector.

    Args:
        name: One of ``SELECTORS``, an entry point's name, ``module:Class``, or ``kvpress:`` and a press.
        parameters: Those that differ from the defaults.
        folder: Where a module is looked for before installed ones, if anywhere.

    Raises:
        InputError: An unknown name or parameter, a value that the selector does not take, or a module or class that
            cannot be used.
    """
    if name.startswith(PREFIX):
        return build_kvpress(name, parameters)
    selector = build(SELECTOR_KIND, name, parameters, SELECTORS, folder, [PREFIX + "NAME"])
    if name in SELECTORS:
        for key in _POSITIONS:
            if int(parameters.get(key, 0)) > _MOST_POSITIONS:
                raise InputError(f"{key} = {parameters[key]}: should be at most {_MOST_POSITIONS:,}")
    else:
        check_statistics(selector)
    return selector
