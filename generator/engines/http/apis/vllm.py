"""vLLM's OpenAI-compatible server: whole laws of histories that are given as token ids.

The request names the number of all log-probabilities. With ``logprobs = -1`` the server computes them all, but its
answer to a completion has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.http.apis.api import PROBE, ServerFacts, whole_law
from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.settings import ServerSettings
from kvdrift.schema.errors import InputError, OperationError

NAMED_BY_ID: Final = "token_id:"  # how a token is named that is asked for by its id


class Vllm:
    """``vllm serve``, started with ``--max-logprobs -1``."""

    health: Final = "/health"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/version``, ``/v1/models`` and the tokens of a text."""
        version = connection.said("/version")
        if "version" not in version:
            raise InputError(f"{where}: {connection.url} is no vLLM: it has no /version; write another api")
        model = first_model(connection, where)
        said = {
            "server": "vllm", "version": version["version"],
            **{name: model.get(name) for name in ("id", "root", "parent")},
        }  # fmt: skip
        body = {"model": model["id"], "prompt": PROBE, "add_special_tokens": False}
        return ServerFacts(
            said, settings.vocabulary, int(model.get("max_model_len") or 0), (),
            probed_tokenizer(connection, body),
        )  # fmt: skip

    def law(self, connection: Connection, facts: ServerFacts, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logarithms of the next token's probabilities, float32 [V]."""
        body = {
            "model": facts.said["id"], "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": facts.vocabulary, "seed": 1,
            "return_tokens_as_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        answer = connection.ask("/v1/completions", body)
        try:
            likely: dict[str, Any] = answer["choices"][0]["logprobs"]["top_logprobs"][0] or {}
            ids = [int(name.removeprefix(NAMED_BY_ID)) for name in likely]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise OperationError(
                f"{connection.url}/v1/completions: the answer has no log-probabilities by token id"
            ) from None
        return whole_law(ids, list(likely.values()), facts.vocabulary, connection.url)


def first_model(connection: Connection, where: str) -> dict[str, Any]:
    """Return the report of an OpenAI-compatible server about the model that it serves."""
    models = connection.said("/v1/models").get("data")
    if not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise InputError(f"{where}: {connection.url}/v1/models lists no model")
    return dict(models[0])


def probed_tokenizer(connection: Connection, body: dict[str, Any]) -> str | None:
    """Return SHA-256 of the tokens of a text that distinguishes tokenizers; None if the server cannot tokenize."""
    tokens = connection.said("/tokenize", body).get("tokens")
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest() if tokens else None
