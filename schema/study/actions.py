"""``[[actions]]``: what is kept of a prompt's entries, how that is stored, and what every step reads."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, model_validator
from pydantic.json_schema import SkipJsonSchema

from schema.errors import InputError
from schema.retention import Retention
from schema.study.mistakes import missing
from schema.study.model import FINITE_STATE, HTTP
from schema.study.section import ActionName, Section, Value, meaning

CONTROL_ACTION = "full"
CONTROL_REPLICATES = 2
FLOOR_ACTION = "floor"
"""With an engine: the reference again, which shares nothing with the reference."""
NUMERICS = "numerics"  # the selector of noise floors

_WHOLE: dict[str, Any] = {"selector": CONTROL_ACTION, "keep": "all"}  # of an action that names no selector

_SIDE = ("settings", "weights", "url")  # keys of an engine's side

Named = str | dict[str, Value]
"""What an action has beside its selector: a name, or a table of a name and parameters."""


class ActionSection(Section):
    """``[[actions]]``: a selector, its parameters and its retention; a codec; or both. Of a finite-state system a name.

    A decode-time policy stands in place of a selector and a codec; its budget is ``keep``.

    Every further key is a parameter of the selector, which says what it takes: ``generator.selectors.build_selector``.
    A codec's parameters, and a policy's, are in its own table.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Value]

    name: Annotated[ActionName, meaning("The action's name, in queries and on the page.", example="snapkv-half")]
    selector: Annotated[
        str,
        meaning(
            "What chooses the entries to keep: one of `kvdrift list selectors`, or `module:Class` of your own; it may "
            "be left out where there is a codec or a policy.",
            example="snapkv",
            needed=True,
        ),
    ] = FINITE_STATE
    keep: Annotated[
        int | str | SkipJsonSchema[float],  # a float is refused by Retention, which says what to write instead
        meaning(
            'How many of a prompt\'s n entries each head keeps: a number, an exact share such as "1/2" or "90%", or '
            '"all". With a policy: how many every step reads at most, prompt and generated together. A list, such as '
            '["1/8", "1/4", "1/2"], makes an action of each, called by its name and the value: `snapkv@1/4`.',
            "entries",
            example="1/2",
            needed=True,
        ),
    ] = "all"

    codec: Annotated[
        Named | None,
        meaning(
            "How what is kept is stored: one of `kvdrift list codecs`, `module:Class` of your own, or a table of a "
            '`name` and parameters, as in `{ name = "int4", group = 64 }`. A list makes an action of each, called by '
            "its name and the codec's: `half@int4`.",
            example="int8",
        ),
    ] = None

    policy: Annotated[
        Named | None,
        meaning(
            "A policy that bounds what every step reads, in place of a selector: one of `kvdrift list policies`, "
            "`module:Class` of your own, or a table of a `name` and parameters, as in "
            '`{ name = "sliding", sinks = 8 }`.',
            example="sliding",
        ),
    ] = None

    settings: Annotated[
        dict[str, Value] | None,
        meaning(
            "With an engine, its settings that differ from those of the reference, such as "
            '`{ type_k = "q8_0", type_v = "q4_0" }`.',
            example={"type_k": "q8_0"},
        ),
    ] = None

    weights: Annotated[
        str | None,
        meaning("With an engine, other weights of the same model and tokenizer.", example="model-Q4_K_M.gguf"),
    ] = None

    url: Annotated[
        str | None,
        meaning(
            'With `engine = "http"`, the address of the action\'s server, which has the same model and tokenizer.',
            example="http://127.0.0.1:8081",
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _whole_without_selector(cls, values: Any) -> Any:
        """Keep everything where a codec stands alone, at first where there is a policy, and with an engine."""
        if isinstance(values, dict) and any(values.get(name) is not None for name in _SIDE):
            return _WHOLE | values
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
        """The codec's name; None where there is none."""
        return str(self.codec["name"]) if isinstance(self.codec, dict) else self.codec

    @property
    def codec_parameters(self) -> dict[str, Value]:
        """The codec parameters that the study sets."""
        return {key: self.codec[key] for key in self.codec if key != "name"} if isinstance(self.codec, dict) else {}

    @property
    def policy_name(self) -> str | None:
        """The policy's name; None where there is none."""
        return str(self.policy["name"]) if isinstance(self.policy, dict) else self.policy

    @property
    def policy_parameters(self) -> dict[str, Value]:
        """The policy parameters that the study sets."""
        return {key: self.policy[key] for key in self.policy if key != "name"} if isinstance(self.policy, dict) else {}

    def check_kind(self, where: str, *, finite: bool, engine: str | None = None) -> None:
        """Check that the action has the keys that its kind of model needs; a finite-state one's has a name alone.

        With an engine it has settings, weights or both.
        """
        given = self.model_fields_set - {"name"}
        if engine is not None:
            self._check_engine(where, engine)
            return
        for name in _SIDE:
            if getattr(self, name) is not None:
                raise InputError(f'{where}.{name}: belongs to an engine; write engine = "llama.cpp" under [model]')
        if finite and given:
            raise InputError(f"{where}.{min(given)}: unknown key; a finite-state system's actions are laws")
        for name in () if finite else ("selector", "keep"):
            if name not in given:
                raise InputError(missing(type(self), where, name, self.parameters))
        if isinstance(self.codec, dict) and not isinstance(self.codec.get("name"), str):
            raise InputError(f'{where}.codec: has no name; write codec = {{ name = "int4", group = 64 }}, say')
        if isinstance(self.policy, dict) and not isinstance(self.policy.get("name"), str):
            raise InputError(f'{where}.policy: has no name; write policy = {{ name = "sliding", sinks = 8 }}, say')
        if self.policy is not None:
            self._check_policy(where)

    def _check_engine(self, where: str, engine: str) -> None:
        """Check that the action says how the engine decodes, and nothing of what kvdrift itself would do."""
        if self.name == FLOOR_ACTION:
            others = (self.settings, self.weights, self.url, self.codec, self.policy)
            if self.selector != NUMERICS or any(one is not None for one in others) or self.parameters:
                raise InputError(f"{where}: '{FLOOR_ACTION}' is the reference again, which a study adds by itself")
            return
        whole = {"selector": self.selector, "keep": self.keep} == _WHOLE
        given = [name for name in ("codec", "policy") if getattr(self, name) is not None]
        other = [*([] if whole else ["keep"]), *given, *self.parameters]
        if engine == HTTP:
            self._check_server(where)
        elif self.url is not None:
            raise InputError(f'{where}.url: belongs to servers; write engine = "http" under [model]')
        elif self.settings is None and self.weights is None:
            raise InputError(
                f'{where}: says nothing of {engine}; write settings = {{ type_k = "q8_0" }} or weights = "OTHER.gguf"'
            )
        if other:
            raise InputError(f"{where}.{other[0]}: {engine} decodes, and what it keeps are its settings and weights")

    def _check_server(self, where: str) -> None:
        """Check that the action is a server, which has weights of its own."""
        if self.url is None:
            raise InputError(f'{where}.url: missing; the address of the action\'s server, "http://127.0.0.1:8081", say')
        if self.weights is not None:
            raise InputError(f"{where}.weights: a server has its own weights; start one that has these")

    def _check_policy(self, where: str) -> None:
        """Check that nothing else decides what is kept."""
        if self.selector != CONTROL_ACTION or self.codec is not None:
            other = "codec" if self.selector == CONTROL_ACTION else "selector"
            raise InputError(f"{where}.{other}: an action with a policy has no {other}; leave one of the two out")
        if self.parameters:
            key = min(self.parameters)
            line = (
                f'parameters of a policy are in its own table: policy = {{ name = "{self.policy_name}", {key} = ... }}'
            )
            raise InputError(f"{where}.{key}: unknown key; {line}")
        if self.retention.rule is None:
            raise InputError(
                f'{where}.keep = "all": a policy needs the number of entries that a step reads, or a share'
            )
