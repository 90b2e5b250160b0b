"""The tokenizer of a GGUF file, through llama.cpp."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from pathlib import Path
from typing import Any

from kvdrift.generator.llama_cpp.weights import Weights, check_is_gguf
from kvdrift.schema.errors import InputError

_CONTROL, _USER_DEFINED = 1 << 3, 1 << 4  # of llama.cpp's kinds of tokens
_TOKEN_BYTES = 16  # about what the text of a token takes; a call that needs more says how much


class GgufTokenizer:
    """The tokenizer of a GGUF file, with the methods of transformers' tokenizers that documents and pages use.

    Of the weights, the vocabulary is enough.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights, self._calls = weights, weights.library.calls
        template = self._calls.llama_model_chat_template(weights.handle, None)
        self.chat_template: str | None = None if template is None else template.decode()

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if the file names none, for which llama.cpp takes a token of text."""
        token = int(self._calls.llama_vocab_bos(self._weights.vocabulary))
        return token if token >= 0 and self._calls.llama_vocab_is_control(self._weights.vocabulary, token) else None

    @functools.cached_property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens that are found in a text before it is cut, by id, in transformers' form."""
        from tokenizers import AddedToken  # noqa: PLC0415 - only prompts of text need it

        kinds = (self._calls.llama_vocab_get_attr(self._weights.vocabulary, token) for token in itertools.count())
        return {
            token: AddedToken(name.decode(errors="replace"), special=bool(kind & _CONTROL))
            for token, (name, kind) in enumerate(zip(self.names(), kinds, strict=False))
            if name and kind & (_CONTROL | _USER_DEFINED)
        }

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: bool
    ) -> Mapping[str, list[int]]:
        """Tokenize a text; the token ids are under ``input_ids``.

        Control tokens in the text are read as such, or with ``split_special_tokens`` like other text.
        """
        encoded = text.encode()
        room = len(encoded) + 8
        while True:
            ids = (c_int32 * room)()
            count = self._calls.llama_tokenize(
                self._weights.vocabulary,
                encoded,
                len(encoded),
                ids,
                room,
                add_special_tokens,
                not split_special_tokens,
            )
            if count >= 0:
                return {"input_ids": list(ids[:count])}
            room = -count

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        """Write a conversation in the model's own form, by the file's template, or with tools by that for tools."""
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes seconds

        render: Any = render_jinja_template
        options.pop("tokenize", None)
        eos = int(self._calls.llama_vocab_eos(self._weights.vocabulary))
        named = (
            self._calls.llama_model_chat_template(self._weights.handle, b"tool_use") if options.get("tools") else None
        )
        template = self.chat_template if named is None else named.decode()
        special = {"bos_token": self._text(self.bos_token_id), "eos_token": self._text(None if eos < 0 else eos)}
        rendered, _ = render([conversation], chat_template=template, **(special | options))
        return str(rendered[0])

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False, **_: bool) -> str:
        """Return the text of some tokens."""
        ids = (c_int32 * len(tokens))(*tokens)
        room = _TOKEN_BYTES * len(tokens) + 1
        while True:
            text = ctypes.create_string_buffer(room)
            length = self._calls.llama_detokenize(
                self._weights.vocabulary,
                ids,
                len(tokens),
                text,
                room,
                False,  # noqa: FBT003 - a C function has no keywords
                not skip_special_tokens,
            )
            if length >= 0:
                return text.raw[:length].decode(errors="replace")
            room = -length

    def get_vocab(self) -> dict[str, int]:
        """Return the tokens by their names in the file; of tokens with equal names, the last."""
        return {name.decode(errors="replace"): token for token, name in enumerate(self.names())}

    def names(self) -> list[bytes]:
        """Return the name of each token in the file, in the order of ids."""
        vocabulary = self._weights.vocabulary
        count = self._calls.llama_vocab_n_tokens(vocabulary)
        return [self._calls.llama_vocab_get_text(vocabulary, token) or b"" for token in range(count)]

    def _text(self, token: int | None) -> str:
        name = None if token is None else self._calls.llama_vocab_get_text(self._weights.vocabulary, token)
        return (name or b"").decode()


def load_gguf_tokenizer(file: Path) -> GgufTokenizer | None:
    """Load the tokenizer of a GGUF file; None if the file has none."""
    check_is_gguf(file)
    return _loaded(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _loaded(file: Path, _modified: int) -> GgufTokenizer | None:
    weights = Weights(file, vocabulary_only=True)
    return GgufTokenizer(weights) if weights.facts.has_tokenizer else None


def gguf_tokenizer_sha256(file: Path) -> str:
    """Return the SHA-256, in hexadecimal, of the names of a GGUF file's tokens and of its chat template."""
    tokenizer = load_gguf_tokenizer(file)
    if tokenizer is None:
        raise InputError(f"{file}: has no tokenizer")
    said = [[name.hex() for name in tokenizer.names()], tokenizer.chat_template]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
