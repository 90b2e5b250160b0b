"""``[[actions]]``: which entries of a prompt are kept, how they are stored, and which entries a step reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict, model_validator
from pydantic.json_schema import SkipJsonSchema

from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study.model import FINITE_STATE, HTTP, LLAMA_CPP, TRANSFORMERS
from kvdrift.schema.study.section import ActionName, Section, Value, meaning, missing

CONTROL_ACTION = "full"
CONTROL_REPLICATES = 2
FLOOR_ACTION = "floor"
"""The action that repeats the reference in a separate cache, for models with an engine."""
KERNEL_FLOOR_ACTION = "kernel-floor"
"""The action that computes the reference's cache by another kernel, for models with an engine."""
NUMERICS = "numerics"  # the selector of noise floors
EXTERNAL = "external"  # the selector of actions of another generator

_WHOLE: dict[str, Any] = {"selector": CONTROL_ACTION, "keep": "all"}  # for an action without a selector
_EXAMPLES = {TRANSFORMERS: 'settings = { press = "SnapKVPress(compression_ratio=0.5)" }'}  # of an engine's action
_SIDE = ("settings", "weights", "url")  # keys of an engine's side

Named = str | dict[str, Any]
"""A codec or policy as a study file names it: a name, or a table of a name and parameters.

``kvdrift.generator.selectors.custom.parts`` checks names and types of parameters; its errors list the known parameters.
"""


HALVES = ("keys", "values")
"""The parts of a cache that may have codecs of their own."""
_LAYERS = ("layers", "skip_layers")


def name_of_codec(written: Named) -> str | None:
    """Return the name of a codec as a study file writes it; None if it has none.

    The name of codecs of keys and of values is both names, as in ``int8+exact``.
    """
    if isinstance(written, str):
        return written
    if "name" in written:
        return written["name"] if isinstance(written["name"], str) else None
    halves = [written.get(part, "exact") for part in HALVES]
    found = [half.get("name") if isinstance(half, dict) else half for half in halves]
    names = [name for name in found if isinstance(name, str) and name]
    complete = len(names) == len(HALVES) and any(part in written for part in HALVES)
    return "+".join(names) if complete else None


class ActionSection(Section):
    """``[[actions]]``: a selector with its parameters and retention, a codec, or both; or a decode-time policy.

    With a policy, ``keep`` is the policy's budget. With an engine, an action has ``settings``, ``weights`` or a ``url``
    instead. An action of a finite-state system has only a name.

    Every further key is a parameter of the selector; ``kvdrift.generator.selectors.build_selector`` checks these keys.
    The parameters of a codec or a policy are in its own table.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Value]

    name: ActionName = meaning("The action's name in queries and on the page.", example="snapkv-half")
    selector: str = meaning(
        "The selector, which chooses the entries to keep: a name from `kvdrift list selectors`, or "
        "`module:Class` of your own. It may be left out if there is a codec or a policy.",
        example="snapkv",
        needed=True,
        default=FINITE_STATE,
    )
    keep: int | str | SkipJsonSchema[float] = meaning(
        'How many of a prompt\'s n entries each head keeps: a number, an exact share such as "1/2" or "90%", '
        'or "all". With a policy: the most entries that a step reads, prompt and generated entries '
        'together. A list such as ["1/8", "1/4", "1/2"] makes one action for each value; the action\'s name '
        "gets the value at its end: `snapkv@1/4`.",
        "entries",
        example="1/2",
        needed=True,
        default="all",
    )

    codec: Named | None = meaning(
        "The codec, which stores the kept entries: a name from `kvdrift list codecs`, `module:Class` of "
        'your own, or a table of a `name` and parameters, as in `{ name = "int4", group = 64 }`. Keys and values may '
        'have codecs of their own: `{ keys = "int8", values = "turboquant-4bit" }`; a part that is left out stays '
        "exact. A list makes one action for each codec; the action's name gets the codec's name at its end: "
        "`half@int4`.",
        example="int8",
        default=None,
    )

    layers: list[int] | None = meaning(
        "The only layers in which the selector chooses and the codec stores; other layers keep every entry, exact. "
        "Layers with full attention are numbered from 0; -1 is the last. A list in the codec's own table holds for the "
        "codec alone.",
        example=[0, 1],
        default=None,
    )

    skip_layers: list[int] | None = meaning(
        "The layers that keep every entry, exact, such as `[0, 1, -2, -1]`; in place of `layers`.",
        example=[0, 1, -2, -1],
        default=None,
    )

    policy: Named | None = meaning(
        "A policy, in place of a selector, which bounds the entries that every step reads: a name from "
        "`kvdrift list policies`, `module:Class` of your own, or a table of a `name` and parameters, as in "
        '`{ name = "sliding", sinks = 8 }`.',
        example="sliding",
        default=None,
    )

    settings: dict[str, Value] | None = meaning(
        "With an engine, the action's settings that differ from the reference's settings, such as `{ type_k "
        '= "q8_0", type_v = "q4_0" }`.',
        example={"type_k": "q8_0"},
        default=None,
    )

    weights: str | None = meaning(
        "Other weights with the reference's vocabulary and tokenizer, such as a quantized, pruned or "
        "fine-tuned checkpoint: a folder, a Hugging Face id, or with an engine a file. The model with these "
        "weights reads the prompt itself, and a selector, codec or policy applies to its own cache.",
        example="model-4bit",
        default=None,
    )

    url: str | None = meaning(
        'With `engine = "http"`, the address of the action\'s server. The server must have the same model '
        "and tokenizer as the reference.",
        example="http://127.0.0.1:8081",
        default=None,
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_without_selector(cls, values: Any) -> Any:
        """Return the section with the selector and ``keep`` that its codec, policy, weights or engine imply."""
        side = isinstance(values, dict) and any(values.get(name) is not None for name in _SIDE)
        if side and "selector" not in values:
            floor = {"selector": NUMERICS} if values.get("name") == KERNEL_FLOOR_ACTION else {}
            return _WHOLE | floor | values
        if isinstance(values, dict) and values.keys() == {"name"} and values["name"] == FLOOR_ACTION:
            return values | {"selector": NUMERICS, "keep": "all"}
        if isinstance(values, dict) and values.get("policy") is not None:
            return {"selector": CONTROL_ACTION} | values
        if not isinstance(values, dict) or values.get("codec") is None:
            return values
        alone = "selector" not in values and values.get("keep", "all") == "all"
        return _WHOLE | values if alone else values

    @property
    def retention(self) -> Retention:
        """The parsed retention rule."""
        return Retention.parse(self.keep)

    @property
    def parameters(self) -> dict[str, int | float | str | bool]:
        """The selector parameters that the study sets; a parameter that it does not set keeps its default."""
        return dict(self.__pydantic_extra__)

    @property
    def codec_name(self) -> str | None:
        """The codec's name; those of keys and values, as in ``int8+turboquant-4bit``; None without a codec."""
        return None if self.codec is None else name_of_codec(self.codec)

    @property
    def codec_halves(self) -> dict[str, dict[str, Any]] | None:
        """The codecs of keys and of values, as tables with a name; None if one codec stores both."""
        if not isinstance(self.codec, dict) or "name" in self.codec:
            return None
        written = {part: self.codec[part] for part in HALVES if part in self.codec}
        return {part: half if isinstance(half, dict) else {"name": half} for part, half in written.items()}

    @property
    def codec_parameters(self) -> dict[str, Any]:
        """The parameters in the codec's table, without names and without the codecs of keys and of values."""
        if not isinstance(self.codec, dict):
            return {}
        named = ("name",) if "name" in self.codec else HALVES
        return {key: value for key, value in self.codec.items() if key not in named}

    @property
    def policy_name(self) -> str | None:
        """The policy's name; None without a policy."""
        return str(self.policy["name"]) if isinstance(self.policy, dict) else self.policy

    @property
    def policy_parameters(self) -> dict[str, Any]:
        """The policy parameters that the study sets."""
        return {key: self.policy[key] for key in self.policy if key != "name"} if isinstance(self.policy, dict) else {}

    def check_kind(self, where: str, *, finite: bool, engine: str | None = None) -> None:
        """Check that the action has the keys that its kind of model needs.

        An action of a finite-state system has a name alone. With an engine an action has settings, weights or both; if
        the engine is a server, the action has a url.
        """
        for key, fault in self._faults_with(engine) if engine is not None else self._faults(finite=finite):
            raise InputError(f"{where}{key and '.'}{key}: {fault}")
        for name in ("selector", "keep") if engine is None and not finite else ():
            if name not in self.model_fields_set:
                raise InputError(missing(type(self), where, name, self.parameters))
        if self.policy is not None and self.retention.rule is None:
            raise InputError(
                f'{where}.keep = "all": a policy needs the number of entries that a step reads, or a share'
            )

    def _faults(self, *, finite: bool) -> Iterator[tuple[str, str]]:
        """Yield each key that an action without an engine cannot have, with the reason."""
        for key, kind in (("settings", LLAMA_CPP), ("url", HTTP)):
            if getattr(self, key) is not None:
                yield key, f'belongs to an engine; write engine = "{kind}" under [model]'
        for key in sorted(self.model_fields_set - {"name"}) if finite else ():
            yield key, "unknown key; an action of a finite-state system has only a name"
        if isinstance(self.codec, dict) and name_of_codec(self.codec) is None:
            yield "codec", 'has no name; write { name = "int4", group = 64 } or { keys = "int8", values = "int4" }'
        if isinstance(self.policy, dict) and not isinstance(self.policy.get("name"), str):
            yield "policy", 'has no name; name it as in policy = { name = "sliding", sinks = 8 }'
        if self.policy is not None:
            yield from self._faults_beside_policy()

    def _faults_with(self, engine: str) -> Iterator[tuple[str, str]]:
        """Yield each key that does not change how an engine decodes, or that is missing, with the reason."""
        if self.name == FLOOR_ACTION:
            others = (self.settings, self.weights, self.url, self.codec, self.policy)
            if self.selector != NUMERICS or any(value is not None for value in others) or self.parameters:
                yield "", f"kvdrift adds '{FLOOR_ACTION}' to a study with an engine; remove the action"
            return
        floor = {"selector": NUMERICS} if self.name == KERNEL_FLOOR_ACTION else {}
        if floor and self.weights is not None:
            yield "weights", f"'{self.name}' has the reference's weights; give this action another name"
        if engine == HTTP and self.url is None:
            yield "url", 'missing; write the action\'s server, as in url = "http://127.0.0.1:8081"'
        if engine == HTTP and self.weights is not None:
            yield "weights", "a server has its own weights; start a server with these weights"
        if engine != HTTP and self.url is not None:
            yield "url", 'belongs to servers; write engine = "http" under [model]'
        if engine != HTTP and self.settings is None and self.weights is None:
            example = _EXAMPLES.get(engine, 'settings = { type_k = "q8_0" }')
            yield "", f'no settings and no weights; write {example} or weights = "OTHER"'
        kept = {"selector": self.selector, "keep": self.keep} != _WHOLE | floor
        parts = [name for name in ("codec", "policy", *_LAYERS) if getattr(self, name) is not None]
        for key in (*(["keep"] * kept), *parts, *self.parameters):
            yield key, f"does not apply to {engine}, whose actions have only settings, weights or a url"

    def _faults_beside_policy(self) -> Iterator[tuple[str, str]]:
        """Yield each key that an action with a policy cannot have, with the reason."""
        for key, there in (("selector", self.selector != CONTROL_ACTION), ("codec", self.codec is not None)):
            if there:
                yield key, f"an action with a policy has no {key}; leave one of the two out"
        for key in sorted(self.parameters):
            right = f'policy = {{ name = "{self.policy_name}", {key} = ... }}'
            yield key, f"unknown key; parameters of a policy are in its own table: {right}"
        for key in _LAYERS:
            if getattr(self, key) is not None:
                yield key, f"a policy bounds the entries of all layers; leave {key} out"
