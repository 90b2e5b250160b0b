"""The study file's settings of a server, and its limits on requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

from kvdrift.schema.errors import InputError, nearest

LLAMA_SERVER: Final = "llama-server"
VLLM: Final = "vllm"
SGLANG: Final = "sglang"
OPENAI: Final = "openai"
APIS: Final = (LLAMA_SERVER, VLLM, SGLANG, OPENAI)

_MOST_VOCABULARY, _MOST_SECONDS = 1 << 22, 86_400


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one side's server."""

    api: str = LLAMA_SERVER  # the server's interface, one of ``APIS``. "openai" gives tokens at temperature 0 only
    started: str = ""  # how the server was started, in the user's words, since no server reports all of it
    vocabulary: int = 0  # V, the number of tokens; 0 if the server reports it
    ahead: int = 32  # with "openai", the number of tokens that the server writes in a request

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> ServerSettings:
        """Return the settings, with the values that a study file gives."""
        made = _made(cls, given, where)
        if made.api not in APIS:
            raise InputError(f"{where}: api = '{made.api}': {nearest(made.api, APIS)}")
        _check_between(where, "vocabulary", made.vocabulary, 0, _MOST_VOCABULARY)
        _check_between(where, "ahead", made.ahead, 1, 1 << 16)
        if not made.vocabulary and made.api != LLAMA_SERVER:
            raise InputError(
                f"{where}: vocabulary: missing; {made.api} does not say how many tokens there are: write the "
                "vocab_size of the model's config.json"
            )
        return made

    @property
    def asked(self) -> dict[str, Any]:
        """Return the interface, and the settings that are given."""
        return {name: value for name, value in asdict(self).items() if name == "api" or value != _DEFAULTS[name]}


_DEFAULTS: Final = asdict(ServerSettings())


@dataclass(frozen=True)
class Requests:
    """Limits on requests to servers; they do not change the answers."""

    at_once: int = 0  # the most requests of a server at once; 0 for the number of llama-server's slots, else 8
    timeout: int = 300  # seconds to wait for an answer
    patience: int = 600  # seconds to wait for a server that is gone or still loads its model

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Requests:
        """Return the limits, with the values that a study file gives under ``model.requests``."""
        where = "model.requests"
        made = _made(cls, given, where)
        _check_between(where, "at_once", made.at_once, 0, 4096)
        _check_between(where, "timeout", made.timeout, 1, _MOST_SECONDS)
        _check_between(where, "patience", made.patience, 0, _MOST_SECONDS)
        return made


_Made = TypeVar("_Made", ServerSettings, Requests)


def _made(kind: type[_Made], given: Mapping[str, Any], where: str) -> _Made:
    known = {field.name: field.default for field in fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise InputError(f"{where}: unknown setting '{name}' of servers; {nearest(name, known)}")
        if type(value) is not type(known[name]):
            raise InputError(f"{where}: {name} = {value!r}: write a value like {known[name]!r}")
    return kind(**given)


def _check_between(where: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"{where}: {name} = {value}: write {least} to {most}")
