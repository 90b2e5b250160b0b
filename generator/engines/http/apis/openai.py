"""Any OpenAI-compatible server that takes and returns token ids, at temperature 0: tokens without laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvdrift.generator.engines.http.apis.api import ServerFacts
from kvdrift.generator.engines.http.apis.vllm import NAMED_BY_ID, first_model
from kvdrift.generator.engines.http.connection import Connection
from kvdrift.generator.engines.http.settings import ServerSettings
from kvdrift.schema.errors import InputError


class OpenAi:
    """A server with ``/v1/completions`` whose answers have token ids."""

    health: Final = "/v1/models"

    def facts(self, connection: Connection, settings: ServerSettings, where: str) -> ServerFacts:
        """Ask for ``/v1/models`` and, if the server has them, ``/version`` and ``/props``."""
        model = first_model(connection, where)
        said = {
            "server": "openai",
            **{name: model.get(name) for name in ("id", "root", "owned_by")},
            "version": connection.said("/version").get("version"),
            "build_info": connection.said("/props").get("build_info"),
        }
        positions = int(model.get("max_model_len") or 0)
        return ServerFacts(said, settings.vocabulary, positions, (), None)

    def written(
        self, connection: Connection, facts: ServerFacts, tokens: Sequence[int], count: int
    ) -> tuple[list[int], bool]:
        """Return the tokens that a server writes after a history, and whether it ended the text there."""
        body = {
            "model": facts.said["id"], "prompt": list(tokens), "max_tokens": count, "temperature": 0.0, "logprobs": 1,
            "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        }  # fmt: skip
        answer = connection.ask("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            return _ids(choice), choice.get("finish_reason") == "stop"
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{connection.url}/v1/completions: the answer has no token ids, and a text cannot be compared token by "
                "token: neither token_ids, nor logprobs.content with ids, nor logprobs.tokens of the form token_id:7"
            ) from None


def _ids(choice: dict[str, Any]) -> list[int]:
    """Return the token ids of a choice, from whichever of three places the server uses."""
    if choice.get("token_ids") is not None:
        return [int(token) for token in choice["token_ids"]]
    logprobs = choice["logprobs"]
    if logprobs.get("content") is not None:
        return [int(one["id"]) for one in logprobs["content"]]
    if not all(name.startswith(NAMED_BY_ID) for name in logprobs["tokens"]):
        raise ValueError
    return [int(name.removeprefix(NAMED_BY_ID)) for name in logprobs["tokens"]]
