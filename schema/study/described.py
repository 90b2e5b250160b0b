"""Describe an action in words, for the command line, the plan and the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study.actions import FLOOR_ACTION, HALVES, NUMERICS
from kvdrift.schema.study.model import FINITE_STATE

_SHARES = {
    Fraction(1, 2): "half", Fraction(1, 3): "a third", Fraction(2, 3): "two thirds", Fraction(1, 4): "a quarter",
    Fraction(3, 4): "three quarters", Fraction(1, 8): "an eighth",
}  # fmt: skip


def described_action(row: Mapping[str, Any]) -> str:
    """Return an action in words, as in ``snapkv, half of the entries, then int8 (groups of 32, the last 128 exact)``.

    ``row`` is the action's row of table ``actions``; columns of later schema versions may be missing. The words are
    empty for a distribution of a finite-state system, and for events of unknown origin.
    """
    if row.get("settings") is not None:
        return _side(row)
    if row.get("weights") is not None:
        alone = (row["selector"], row["keep"], row.get("codec"), row.get("policy")) == ("full", "all", None, None)
        compressed = "" if alone else _compressed(row)
        return ", then ".join(filter(None, (_weights(row["weights"]), compressed)))
    return _compressed(row)


def _compressed(row: Mapping[str, Any]) -> str:
    codec = _named(row.get("codec"), row.get("codec_parameters"))
    if policy := row.get("policy"):
        rule = _named(policy, row.get("policy_parameters"))
        return ", then ".join([f"{rule} while decoding, at most {_count(row['keep'])}", *([codec] if codec else [])])
    if row["control"]:
        return "the full cache, as a control"
    if row["selector"] in {NUMERICS, FINITE_STATE} or row["keep"] == "unknown":
        return "the whole cache, computed in another way" if row["selector"] == NUMERICS else ""
    if codec and row["keep"] == "all":
        return codec
    parameters = json.loads(row.get("parameters") or "{}")
    where = [_CHOSEN[key](parameters[key]) for key in _CHOSEN if key in parameters]
    shared = [f"shared by the heads of a layer ({parameters['budget']})"] if "budget" in parameters else []
    chosen = ", ".join([row["selector"], _count(row["keep"]), *shared, *where])
    return f"{chosen}, then {codec}" if codec else chosen


def _side(row: Mapping[str, Any]) -> str:
    """Return an engine's action in words: its difference from the reference, or which noise floor it is."""
    settings = _settings(row["settings"])
    if row["selector"] != NUMERICS:
        named = "" if row.get("weights") is None else _weights(row["weights"])
        return ", ".join(filter(None, (named, settings))) or "as the reference"
    if row["action"] == FLOOR_ACTION:
        return "the reference repeated, in a separate cache and with separate streams"
    return ": ".join(filter(None, ("the cache of the reference by another kernel", settings)))


def _settings(written: str) -> str:
    """Return an engine's settings, a JSON object, in words; first the user's description of a server."""
    settings = json.loads(written)
    started = [settings.pop("started")] if "started" in settings else []
    words = (f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items())
    return ", ".join([*started, *words])


def _weights(named: str) -> str:
    """Return an action's weights in words, with the last part of their path or id."""
    return f"weights {named.rstrip('/').rpartition('/')[2]}"


def _count(keep: str) -> str:
    """Return the number of entries that a retention rule keeps, in words."""
    try:
        rule = Retention.parse(int(keep) if keep.isdigit() else keep).rule
    except InputError:  # text that another generator wrote
        return keep
    if rule is None:
        return "all of the entries"
    if isinstance(rule, int):
        return f"{rule:,} entries"
    return f"{_SHARES.get(rule, rule)} of the entries"


def _named(name: str | None, parameters: str | None) -> str:
    """Return a codec or policy in words, with its parameters; empty if ``name`` is None."""
    if name is None:
        return ""
    own = json.loads(parameters or "{}")
    if any(isinstance(own.get(part), dict) for part in HALVES):
        return _halves(name, own)
    phrases = [_parameter(key, value) for key, value in own.items()]
    known = [text for text in phrases if text]
    return f"{name} ({', '.join(known)})" if known else name


def _halves(name: str, own: Mapping[str, Any]) -> str:
    """Return the codecs of keys and of values in words, and what holds for both."""
    words = [
        f"{part} {_named(half, json.dumps(own[part]))}" for part, half in zip(HALVES, name.split("+"), strict=True)
    ]
    return ", ".join([*words, *(filter(None, (_parameter(key, own[key]) for key in own if key not in HALVES)))])


def _parameter(key: str, value: Any) -> str:
    """Return a parameter of a codec or policy in words; empty if there is nothing to say."""
    if key in _PHRASES:
        return _PHRASES[key](value)
    return f"{value}-bit {key}" if key in HALVES else f"{key} {value}"


_SCALES = {"head": "a scale for each head", "tensor": "a scale for each layer"}
_PHRASES: Mapping[str, Callable[[Any], str]] = {
    "group": lambda value: f"groups of {value}",
    "generated": lambda value: "generated entries too" if value else "",
    "residual": lambda value: f"the last {value} exact" if value else "",
    "norm_correction": lambda value: "" if value else "norms not corrected",
    "scale": lambda value: _SCALES.get(value, "no scale"),
    "format": str,
    "rotated": lambda value: "heads rotated" if value else "",
    "exact_ends": lambda value: f"the first and last {value} layers exact",
    "layers": lambda value: f"only in layers {_numbers(value)}",
    "skip_layers": lambda value: f"layers {_numbers(value)} exact" if value else "",
}
_CHOSEN: Mapping[str, Callable[[Any], str]] = {  # layers of a selector
    "layers": _PHRASES["layers"],
    "skip_layers": lambda value: f"layers {_numbers(value)} whole",
}


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
