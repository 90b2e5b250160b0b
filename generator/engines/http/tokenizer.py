"""The tokenizer and chat template of a llama-server, asked over HTTP."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken

from kvdrift.generator.engines.http.apis import LlamaServer, all_tokens
from kvdrift.generator.engines.http.connection import LLAMA_SERVER, Connection, Requests, ServerSettings
from kvdrift.schema.errors import KvdriftError
from kvdrift.schema.study import HTTP, ModelSection


class ServerTokenizer:
    """The tokenizer of a llama-server, with the methods of transformers' tokenizers that documents use.

    ``vocabulary`` is the number of its tokens.
    """

    def __init__(self, connection: Connection, vocabulary: int) -> None:
        self._connection, self._vocabulary = connection, vocabulary
        properties = connection.ask("/props")
        self.chat_template: str | None = properties.get("chat_template") or None
        self._bos = str(properties.get("bos_token") or "")

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if the server names none."""
        tokens = self(self._bos, add_special_tokens=False)["input_ids"] if self._bos else []
        return tokens[0] if len(tokens) == 1 else None

    @functools.cached_property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The control tokens by id, in transformers' form: tokens that the server leaves out of what it writes."""
        tokens = all_tokens(self._connection, self._vocabulary)
        silent = sorted(one["id"] for one in tokens if not one["token"] and not one.get("bytes"))
        line = self("\n", add_special_tokens=False)["input_ids"]
        lines = [part for token in silent for part in (token, *line)]
        names = str(self._connection.ask("/detokenize", {"tokens": lines})["content"]).split("\n")
        named = zip(silent, map(str.strip, names[: len(silent)]), strict=True)
        return {token: AddedToken(name, special=True) for token, name in named if name}

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: bool
    ) -> Mapping[str, list[int]]:
        """Tokenize a text; the token ids are under ``input_ids``.

        Control tokens in the text are read as such, or with ``split_special_tokens`` like other text.
        """
        body = {"content": text, "add_special": add_special_tokens, "parse_special": not split_special_tokens}
        return {"input_ids": list(map(int, self._connection.ask("/tokenize", body)["tokens"]))}

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """Write a conversation in the model's own form, by the server's template.

        The server leaves out the template's BOS if its tokenizer adds one; the text has it all the same.
        """
        variables.pop("tokenize", None)
        body: dict[str, Any] = {"messages": conversation, "chat_template_kwargs": variables}
        body["add_generation_prompt"] = add_generation_prompt
        if tools is not None:
            body["tools"] = tools
        try:
            text = str(self._connection.ask("/apply-template", body)["prompt"])
        except KvdriftError as error:
            raise ValueError(str(error)) from None
        adds = self("", add_special_tokens=True)["input_ids"][:1] == [self.bos_token_id]
        return f"{self._bos}{text}" if adds and not text.startswith(self._bos) else text


def server_tokenizer(section: ModelSection) -> ServerTokenizer | None:
    """Return the tokenizer of a reference's server; None if the study file names another, or if the server has none.

    llama-server alone writes conversations without answering them, and cuts texts with and without control tokens.
    """
    if section.engine != HTTP or section.tokenizer is not None:
        return None
    settings = ServerSettings.of(section.settings or {}, "model.settings")
    if settings.api != LLAMA_SERVER:
        return None
    connection = Connection(section.url or "", Requests.of(section.requests or {}), LlamaServer.health)
    meta = (connection.said("/v1/models").get("data") or [{}])[0].get("meta") or {}
    return ServerTokenizer(connection, settings.vocabulary or int(meta.get("n_vocab") or 0))
