"""Expand lists in a study file's actions (sweeps) into one action for each member."""

from __future__ import annotations

import itertools
from typing import Any, Final

from schema.errors import InputError
from schema.retention import Retention
from schema.study.section import MOST_LISTED

SWEPT: Final = ("keep", "codec")
"""The keys of an action that may be lists, in the order of their values in a member's name."""

SIGN: Final = "@"
"""The sign before each value in a member's name."""


def of_each_member(content: dict[str, Any]) -> dict[str, Any]:
    """Return a study file's content with each sweep replaced by one action for each member.

    The action NAME with ``keep = ["1/8", "1/4"]`` becomes ``NAME@1/8`` and ``NAME@1/4``; with a list of codecs too, an
    action for each combination, as in ``NAME@1/8@int4``.

    Args:
        content: The file's content, which need not be valid.

    Raises:
        InputError: A list is empty or too long, or has a value twice or an impossible value.
    """
    actions = content.get("actions")
    if not isinstance(actions, list):
        return content
    made = [member for number, action in enumerate(actions) for member in _members(action, f"actions[{number}]")]
    if len(made) > max(MOST_LISTED, len(actions)):
        raise InputError(f"actions: their lists make {len(made):,} actions; write at most {MOST_LISTED}")
    return content | {"actions": made}


def family_of(action: str) -> str | None:
    """Return the sweep that an action belongs to by its name; None if the action belongs to no sweep."""
    name, sign, _ = action.partition(SIGN)
    return name if sign else None


def families(actions: list[str]) -> dict[str, list[str]]:
    """Return the members of each sweep, in the order of ``actions``; a sweep of one member is no sweep.

    Combinations with different codecs are different sweeps: one for each codec.
    """
    found: dict[str, list[str]] = {}
    for action in actions:
        parts = action.split(SIGN)
        if len(parts) > 1:
            found.setdefault(SIGN.join([parts[0], *parts[2:]]), []).append(action)
    return {name: members for name, members in found.items() if len(members) > 1}


def _members(action: Any, where: str) -> list[Any]:
    """Return the actions that one section makes: one, or one for each member of its lists."""
    if not isinstance(action, dict):
        return [action]
    swept = [key for key in SWEPT if isinstance(action.get(key), list)]
    if not swept or not isinstance(action.get("name"), str):
        return [action]
    labels = [_labels(action[key], key, f"{where}.{key}") for key in swept]
    found = []
    for chosen in itertools.product(*(zip(labels[at], action[key], strict=True) for at, key in enumerate(swept))):
        name = SIGN.join([action["name"], *(label for label, _ in chosen)])
        values = {key: value for key, (_, value) in zip(swept, chosen, strict=True)}
        found.append(action | values | {"name": name})
    return found


def _labels(listed: list[Any], key: str, where: str) -> list[str]:
    """Return the part of each member's name that stands for its value."""
    if not listed:
        raise InputError(f"{where} = []: has no value; write one, or several as in {_EXAMPLES[key]}")
    labels = [_label(value, key, f"{where}[{place}]") for place, value in enumerate(listed)]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"{where}: '{label}' is given {labels.count(label)} times; give each value once")
    return labels


def _label(value: Any, key: str, where: str) -> str:
    if key == "keep":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InputError(f'{where} = {value!r}: write an integer, or an exact fraction such as "1/2"')
        try:
            Retention.parse(value)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return str(value).replace(" ", "")
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise InputError(f'{where} = {value!r}: write a codec\'s name, or {{ name = "int4", group = 64 }}')
    return name


_EXAMPLES: Final = {"keep": '["1/8", "1/4", "1/2"]', "codec": '["int8", "int4"]'}
