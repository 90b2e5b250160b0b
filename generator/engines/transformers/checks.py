"""What ``kvdrift check`` tries of a press, a cache or a patch: the checks of an engine's adapter, and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdrift.generator.engines.engine import Room
from kvdrift.generator.engines.transformers.engine import Side, Transformers, cache_library, press_library
from kvdrift.generator.engines.transformers.expressions import parse
from kvdrift.generator.engines.transformers.trial import effect
from kvdrift.schema.errors import InputError

_PROMPT, _TEXT = 320, 16


class Trying(Transformers):
    """The engine whose sides all have one press, cache or patch: ``text``, as a study file names it.

    ``kind`` is "patch" for a patch; else the class that the expression names says which of the two it is.
    """

    def __init__(self, text: str, kind: str | None, folder: Path) -> None:
        self._folder = folder
        self._own = {"patch" if kind == "patch" else _setting(text, folder): text}

    def side(self, location: str, settings: Mapping[str, Any], where: str, _: Path | None = None) -> Side:
        """Make a side with the press, cache or patch."""
        return super().side(location, {**settings, **self._own}, where, self._folder)

    def effect(self, location: str) -> str:
        """Return in words what the press, cache or patch does to the cache of a prompt, and to distributions."""
        side, reference = self.side(location, {}, "check"), super().side(location, {}, "check")
        room, vocabulary = Room(_PROMPT, 1, _TEXT), side.facts.vocabulary
        prompt, text = (
            [7 * place % vocabulary for place in range(first, first + count)]
            for first, count in ((1, _PROMPT), (5, _TEXT))
        )
        return effect(side.open(room), reference.open(room), prompt, text)


def _setting(text: str, folder: Path) -> str:
    """Return "cache" or "press", as the outermost class of an expression says."""
    try:
        parse(text, "check", cache_library(), folder)
    except InputError as error:
        try:
            parse(text, "check", press_library(), folder)
        except InputError as other:
            name = text.partition("(")[0]
            raise (error if "Cache" in name or "." in name else other) from None
        return "press"
    return "cache"
