"""Selectors choose which prompt entries each KV head keeps; every file has one selector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from generator.selectors.expected_attention import ExpectedAttention
from generator.selectors.full import Full
from generator.selectors.h2o import H2O
from generator.selectors.keydiff import KeyDiff
from generator.selectors.knorm import Knorm
from generator.selectors.kvpress import PREFIX, build_kvpress
from generator.selectors.parameters import Value, check_types, unknown
from generator.selectors.pyramidkv import PyramidKV
from generator.selectors.random_entries import RandomEntries
from generator.selectors.recent import Recent
from generator.selectors.selector import ScoringSelector, Selector
from generator.selectors.snapkv import SnapKV
from generator.selectors.tova import TOVA
from schema.errors import InputError, nearest

SELECTORS: dict[str, type[Selector]] = {
    "full": Full,
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
    "SELECTORS", "Full", "Recent", "ScoringSelector", "Selector", "SnapKV", "build_selector", "default_parameters",
]  # fmt: skip


def default_parameters(selector: type[Selector]) -> dict[str, Any]:
    """The parameters that a study can set, with their defaults."""
    return {field.name: field.default for field in fields(selector)}  # type: ignore[arg-type]  # every one a dataclass


def build_selector(name: str, parameters: Mapping[str, Value]) -> Selector:
    """Make a selector from its name, or ``kvpress:`` and a press, and the parameters that differ from the defaults.

    Raises:
        InputError: An unknown name or parameter, or a value that the selector does not take.
    """
    if name.startswith(PREFIX):
        return build_kvpress(name, parameters)
    if name not in SELECTORS:
        raise InputError(f"unknown selector '{name}'; {nearest(name, [*SELECTORS, PREFIX + 'NAME'])}")
    defaults = default_parameters(SELECTORS[name])
    for parameter in parameters:
        if parameter not in defaults:
            raise InputError(unknown(parameter, name, defaults))
    check_types(parameters, defaults)
    return SELECTORS[name](**parameters)
