"""What a name stands for, a selector or a codec, with the checks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from generator.actions import CODEC_FAMILY
from generator.checks.check import Check, Finding
from generator.checks.codecs import CODEC_CHECKS, CodecSubject
from generator.checks.selectors import CHECKS
from generator.checks.subject import Subject
from generator.codecs import CODECS
from generator.selectors import SELECTORS
from generator.selectors.own.names import entry_point_names, own_class
from generator.selectors.parameters import Value
from schema.errors import InputError


def checks_of(
    name: str, parameters: Mapping[str, Value], folder: Path
) -> list[tuple[Check[Any], Callable[[], Finding]]]:
    """Return the checks of a selector or codec, each with what makes it.

    Args:
        name: Of one of the package, an entry point's, or ``module:Class``.
        parameters: Those that differ from the defaults.
        folder: Where a module is looked for before installed ones.

    Raises:
        InputError: There is no such selector or codec, or it cannot be made.
    """
    if _is_codec(name, folder):
        coded = CodecSubject(name, parameters, folder)
        return [(check, partial(check, coded)) for check in CODEC_CHECKS]
    subject = Subject(name, parameters, folder)
    return [(check, partial(check, subject)) for check in CHECKS]


def _is_codec(name: str, folder: Path) -> bool:
    """Whether a codec has the name; what neither a selector nor a codec has is refused as a selector's."""
    if name in SELECTORS:
        return False
    if name in CODECS or name in entry_point_names(CODEC_FAMILY):
        return True
    try:
        own_class(CODEC_FAMILY, name, folder, CODECS)
    except InputError:
        return False
    return True
