"""Selectors choose which prompt entries each KV head keeps; each selector has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvdrift.generator.selectors.custom.parts import PartKind, check_statistics, default_parameters
from kvdrift.generator.selectors.expected_attention import ExpectedAttention
from kvdrift.generator.selectors.full import Full
from kvdrift.generator.selectors.h2o import H2O
from kvdrift.generator.selectors.keydiff import KeyDiff
from kvdrift.generator.selectors.knorm import Knorm
from kvdrift.generator.selectors.kvpress import PREFIX, build_kvpress
from kvdrift.generator.selectors.numerics import Numerics
from kvdrift.generator.selectors.parameters import Value
from kvdrift.generator.selectors.pyramidkv import PyramidKV
from kvdrift.generator.selectors.random_entries import RandomEntries
from kvdrift.generator.selectors.recent import Recent
from kvdrift.generator.selectors.selector import EVEN, ScoringSelector, Selector
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

SELECTOR_KIND: PartKind[Selector] = PartKind(
    noun="selector", plural="selectors", base=Selector, known=SELECTORS,
    derive="ScoringSelector or Selector of kvdrift.generator.selectors.selector", says="what it keeps",
    keys=("name", "selector", "keep", "codec", "layers", "skip_layers"), counts=("window", "sinks"),
    forms=(f"{PREFIX}NAME",),
)  # fmt: skip

# Parameters that cost memory or time for each position, whatever the prompt, and their bound, which no model reaches.
_POSITIONS = ("future_positions", "kernel")
_MOST_POSITIONS = 2**20

__all__ = [
    "SELECTORS", "SELECTOR_KIND", "Full", "Numerics", "Recent", "ScoringSelector", "Selector", "SnapKV",
    "build_selector", "default_parameters",
]  # fmt: skip


def build_selector(name: str, parameters: Mapping[str, Value], folder: Path | None = None) -> Selector:
    """Make the selector ``name``; ``parameters`` has the values that differ from its defaults.

    ``name`` is a key of ``SELECTORS``, an entry point's name, ``module:Class``, or ``kvpress:`` and the name of a
    press. A module is looked for in ``folder``, if any, before installed modules.

    Raises:
        InputError: There is no such selector, it cannot be used, or a parameter is unknown or wrong.
    """
    if name.startswith(PREFIX):
        return build_kvpress(name, parameters)
    selector = SELECTOR_KIND.build(name, parameters, folder)
    shared = isinstance(selector, ScoringSelector) and selector.budget != EVEN
    if shared and type(selector).keep is not ScoringSelector.keep:  # which may choose by more than its scores
        raise InputError(f"budget: selector '{name}' has a keep of its own, which shares no budget; leave budget out")
    if name in SELECTORS:
        for key in _POSITIONS:
            if int(parameters.get(key, 0)) > _MOST_POSITIONS:
                raise InputError(f"{key} = {parameters[key]}: should be at most {_MOST_POSITIONS:,}")
    else:
        check_statistics(selector)
    return selector
