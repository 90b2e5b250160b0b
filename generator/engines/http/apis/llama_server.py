"""llama-server: slots that keep streams, and whole laws by ``n_probs``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.apis.api import ServerFacts, whole_law
from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.settings import ServerSettings
from kvdrift.schema.errors import InputError, OperationError

SAVED: Final = "kvdrift-prompt.bin"  # the file of a saved slot, in the folder that the server was given for such files

_MODEL: Final = ("n_vocab", "n_embd", "n_params", "n_ctx_train", "size", "vocab_type")
_PROPERTIES: Final = ("build_info", "model_ftype", "bos_token", "eos_token")
_PARAMETERS: Final = ("speculative.types", "lora")

_vocabularies: dict[tuple[str, str], _Vocabulary] = {}  # by address and what the server says of itself


class LlamaServer:
    """llama-server of llama.cpp."""

    health: Final = "/health"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/props`` and ``/v1/models``, and for the names of all tokens."""
        properties = connection.said("/props")
        if "total_slots" not in properties:
            raise InputError(
                f"{where}: {connection.url} is no llama-server: it has no /props; write api in its settings"
            )
        models = connection.said("/v1/models").get("data") or [{}]
        meta = models[0].get("meta") or {}
        defaults = properties.get("default_generation_settings") or {}
        parameters = defaults.get("params") or {}
        vocabulary = settings.vocabulary or int(meta.get("n_vocab") or 0)
        if not vocabulary:
            raise InputError(f"{where}: {connection.url} does not say how many tokens there are; write vocabulary")
        said = {
            "server": "llama-server",
            "model": str(properties.get("model_path", "")).rpartition("/")[2],
            **{name: properties.get(name) for name in _PROPERTIES},
            **{name: meta.get(name) for name in _MODEL},
            **{name: parameters.get(name) for name in _PARAMETERS},
            "chat_template": _sha256(properties.get("chat_template") or ""),
        }
        words = _vocabulary(connection, vocabulary, json.dumps(said), properties.get("eos_token"))
        slots, entries = int(properties["total_slots"]), int(defaults.get("n_ctx") or 0)
        beside = {"slots": slots, "entries": entries}
        return ServerFacts(said, vocabulary, entries, words.ends, words.sha256, slots, beside)

    def take(self, connection: Connection, slot: int, tokens: Sequence[int], *, cached: bool) -> int:
        """Let a slot hold some tokens, the whole history, and return how many of them the server computed anew.

        ``cached`` says that the slot's present content may be used.

        Raises:
            LostServerError: The server was gone, and is back.
        """
        return _computed(connection, slot, self._complete(connection, slot, tokens, cached=cached, vocabulary=0))

    def law(
        self, connection: Connection, slot: int, tokens: Sequence[int], vocabulary: int, *, cached: bool = True
    ) -> tuple[NDArray[np.float32], int]:
        """Let a slot hold some tokens; return the law after them, float32 [V], and the number of tokens computed anew.

        Raises:
            LostServerError: The server was gone, and is back.
            InputError: The law lacks tokens.
        """
        answer = self._complete(connection, slot, tokens, cached=cached, vocabulary=vocabulary)
        found = answer.get("completion_probabilities") or [{}]
        likely = found[0].get("top_logprobs") or []
        try:
            ids, logarithms = [one["id"] for one in likely], [one["logprob"] for one in likely]
        except (KeyError, TypeError):
            raise OperationError(f"{connection.url}/completion: log-probabilities have no token ids") from None
        return whole_law(ids, logarithms, vocabulary, connection.url), _computed(connection, slot, answer)

    def slot_bytes(self, connection: Connection, slot: int) -> int | None:
        """Return the bytes of a slot's saved state; None if the server was not started to save slots."""
        written = connection.said(f"/slots/{slot}?action=save", {"filename": SAVED}).get("n_written")
        return int(written) if written else None

    @staticmethod
    def _complete(
        connection: Connection, slot: int, tokens: Sequence[int], *, cached: bool, vocabulary: int
    ) -> dict[str, Any]:
        """Return the answer to a request that decodes some tokens; without a law the request draws no token."""
        body = {
            "prompt": list(tokens), "id_slot": slot, "cache_prompt": cached, "n_predict": 1 if vocabulary else 0,
            "n_probs": vocabulary, "samplers": [], "post_sampling_probs": False, "temperature": 1.0, "seed": 1,
            "stream": False,
        }  # fmt: skip
        answer = connection.ask_once("/completion", body)
        if not isinstance(answer, dict) or answer.get("id_slot") != slot:
            raise OperationError(f"{connection.url}/completion: slot {slot} was asked, and another one answered")
        return answer


def _computed(connection: Connection, slot: int, answer: dict[str, Any]) -> int:
    """Return how many of the sent tokens the server computed; the others were in its cache."""
    timings = answer.get("timings")
    if not isinstance(timings, dict) or not isinstance(timings.get("prompt_n"), int):
        raise OperationError(
            f"{connection.url}/completion: slot {slot}: the answer does not say how many tokens were computed "
            "(timings.prompt_n), so that decoding cannot be told from reading a prompt"
        )
    return int(timings["prompt_n"])


@dataclass(frozen=True)
class _Vocabulary:
    """A server's tokens: SHA-256 of the names of all, and those that end a text."""

    sha256: str
    ends: tuple[int, ...]


def _vocabulary(connection: Connection, vocabulary: int, said: str, eos: Any) -> _Vocabulary:
    """Return a server's tokens, asked once in a process; ``eos`` is the text of its EOS. A whole law has all names."""
    key = (connection.url, said)
    if key in _vocabularies:
        return _vocabularies[key]
    likely = all_tokens(connection, vocabulary)
    names = sorted((one["id"], one.get("bytes") or one.get("token")) for one in likely)
    whole_law([one["id"] for one in likely], [one["logprob"] for one in likely], vocabulary, connection.url)
    _vocabularies[key] = _Vocabulary(_sha256(json.dumps(names)), _ends(connection, eos))
    return _vocabularies[key]


def all_tokens(connection: Connection, vocabulary: int) -> list[dict[str, Any]]:
    """Return what a server reports of each of its ``vocabulary`` tokens, in the order of a distribution."""
    body = {
        "prompt": [0], "n_predict": 1, "n_probs": vocabulary, "samplers": [], "cache_prompt": False, "stream": False,
    }  # fmt: skip
    answer = connection.ask("/completion", body)
    return (answer.get("completion_probabilities") or [{}])[0].get("top_logprobs") or []


def _ends(connection: Connection, eos: Any) -> tuple[int, ...]:
    """Return the tokens at which the server ends a text, its EOS first.

    No report lists them, but a request to go on past the end is answered with the tokens that it excludes: all that
    llama.cpp calls ends of generation.
    """
    body = {"prompt": [0], "n_predict": 0, "ignore_eos": True, "cache_prompt": False, "stream": False}
    excluded = (connection.ask("/completion", body).get("generation_settings") or {}).get("logit_bias") or []
    ends = sorted(one["token"] for one in excluded)
    text = {"content": eos or "", "add_special": False, "parse_special": True}
    tokens = connection.ask("/tokenize", text).get("tokens") if eos else []
    own = tokens if isinstance(tokens, list) and len(tokens) == 1 and isinstance(tokens[0], int) else []
    return tuple(dict.fromkeys([*own, *ends]))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
