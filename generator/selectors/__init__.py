"""Selectors choose which prompt entries each KV head keeps; every file has one selector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from generator.selectors.expected_attention import ExpectedAttention
from generator.selectors.full import Full
from generator.selectors.h2o import H2O
from generator.selectors.keydiff import KeyDiff
from generator.selectors.knorm import Knorm
from generator.selectors.kvpress import PREFIX, build_kvpress
from generator.selectors.own.classes import made
from generator.selectors.own.names import own_selector
from generator.selectors.parameters import Value, check_types, unknown
from generator.selectors.pyramidkv import PyramidKV
from generator.selectors.random_entries import RandomEntries
from generator.selectors.recent import Recent
from generator.selectors.selector import ScoringSelector, Selector
from generator.selectors.snapkv import SnapKV
from generator.selectors.tova import TOVA
from generator.selectors.whole_cache.numerics import Numerics
from schema.errors import InputError

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


def default_parameters(selector: type[Selector]) -> dict[str, Any]:
    """The parameters that a study can set, with their defaults."""
    return {field.name: field.default for field in fields(selector)}  # type: ignore[arg-type]  # every one a dataclass


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
    if name in SELECTORS:
        return _built(SELECTORS[name], name, parameters)
    own = own_selector(name, folder, [*SELECTORS, PREFIX + "NAME"])
    try:
        return _built(own.kind, name, parameters)
    except InputError as error:
        raise InputError(f"{own.file}: {error}") from error.__cause__


def _built(kind: type[Selector], name: str, parameters: Mapping[str, Value]) -> Selector:
    defaults = default_parameters(kind)
    for parameter in parameters:
        if parameter not in defaults:
            raise InputError(unknown(parameter, name, defaults))
    check_types(parameters, defaults)
    return made(kind, parameters)
