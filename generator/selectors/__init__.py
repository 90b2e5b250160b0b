"""Selectors choose which prompt entries each KV head keeps; every file has one selector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from generator.selectors.expected_attention import ExpectedAttention
from generator.selectors.full import Full
from generator.selectors.h2o import H2O
from generator.selectors.keydiff import KeyDiff
from generator.selectors.knorm import Knorm
from generator.selectors.kvpress import PREFIX, build_kvpress
from generator.selectors.own.building import build
from generator.selectors.own.classes import default_parameters
from generator.selectors.own.families import SELECTOR_FAMILY
from generator.selectors.parameters import Value
from generator.selectors.pyramidkv import PyramidKV
from generator.selectors.random_entries import RandomEntries
from generator.selectors.recent import Recent
from generator.selectors.selector import ScoringSelector, Selector
from generator.selectors.snapkv import SnapKV
from generator.selectors.tova import TOVA
from generator.selectors.whole_cache.numerics import Numerics

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
    return build(SELECTOR_FAMILY, name, parameters, SELECTORS, folder, [PREFIX + "NAME"])
