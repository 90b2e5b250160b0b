"""A GGUF file: facts about its model, its weights in memory, and its tokenizer, through llama.cpp."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdrift.generator.llama_cpp.library import Library, ModelParameters, library
from kvdrift.schema.errors import InputError, OperationError

_TEXT = 1 << 16  # bytes of a value of the file's metadata; a chat template may be long
_NO_VOCABULARY = 0
_MAGIC = b"GGUF"
_MMAP = 1
CACHE_TYPES: Final = {
    "f32": (0, 4.0), "f16": (1, 2.0), "bf16": (30, 2.0), "q8_0": (8, 34 / 32), "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32), "q4_1": (3, 20 / 32), "q4_0": (2, 18 / 32), "iq4_nl": (20, 18 / 32),
}  # fmt: skip
"""The types in which llama.cpp stores keys and values: its number for each, and bytes of a value with its scales."""
NOT_CAUSAL = "a token of this model also reads the tokens after it, so that there are no streams to compare"


@dataclass(frozen=True)
class GgufFacts:
    """Facts about the model of a GGUF file."""

    architecture: str  # the architecture's name in llama.cpp
    vocabulary: int  # V, the number of tokens
    positions: int  # the largest number of tokens, prompt and generated tokens, that the model was made for
    key_size: int  # channels of a head's keys
    value_size: int  # channels of a head's values
    eos_tokens: tuple[int, ...]  # all tokens that llama.cpp calls end of generation, the EOS of the metadata first
    kv_heads: int  # the number of KV heads, summed over layers
    has_tokenizer: bool  # whether the file has a tokenizer
    unsupported: str | None  # the reason why streams of this model cannot be forked and compared; None if they can

    def entry_bytes(self, type_k: str, type_v: str) -> int:
        """Return roughly how many bytes a token's keys and values take in all layers, those with a window included."""
        sizes = ((self.key_size, type_k), (self.value_size, type_v))
        return round(sum(self.kv_heads * size * CACHE_TYPES[kind][1] for size, kind in sizes))


class Weights:
    """The model of a GGUF file, in memory for as long as this object lives.

    With ``vocabulary_only``, only the metadata and the vocabulary are read, which takes milliseconds.
    """

    def __init__(self, file: Path, *, vocabulary_only: bool = False) -> None:
        check_is_gguf(file)
        self.library: Library = library()
        self.file = file
        self.library.listen()
        parameters = self.library.parameters(
            ModelParameters, n_gpu_layers=0, load_mode=_MMAP, vocab_only=vocabulary_only
        )
        self.handle: int | None = self.library.calls.llama_model_load_from_file(str(file).encode(), parameters)
        if not self.handle:
            raise InputError(f"{file}: llama.cpp cannot load it: {self.library.last_words()}")
        weakref.finalize(self, self.library.calls.llama_model_free, self.handle)

    @property
    def vocabulary(self) -> Any:
        """The handle of the vocabulary, for calls of the library."""
        return self.library.calls.llama_model_get_vocab(self.handle)

    def metadata(self, key: str) -> str | None:
        """Return a value of the file's metadata as text; None if the file has no such value."""
        room = ctypes.create_string_buffer(_TEXT)
        length = self.library.calls.llama_model_meta_val_str(self.handle, key.encode(), room, _TEXT)
        return None if length < 0 else room.value.decode(errors="replace")

    @functools.cached_property
    def facts(self) -> GgufFacts:
        """Return the facts about the model."""
        calls, architecture = self.library.calls, self.metadata("general.architecture") or "unknown"

        def numbers(name: str) -> list[int]:  # a number, or one for each layer
            return [int(digits) for digits in re.findall(r"\d+", self.metadata(f"{architecture}.{name}") or "")]

        def number(name: str) -> int | None:
            return next(iter(numbers(name)), None)

        heads, width, layers = number("attention.head_count"), number("embedding_length"), number("block_count") or 0
        of_layers = numbers("attention.head_count_kv") or numbers("attention.head_count")
        size = width // heads if heads and width else 0
        tokens = calls.llama_vocab_n_tokens(self.vocabulary)
        has_tokenizer = calls.llama_vocab_type(self.vocabulary) != _NO_VOCABULARY
        if has_tokenizer:
            ends = (token for token in range(tokens) if calls.llama_vocab_is_eog(self.vocabulary, token))
            eos_token = calls.llama_vocab_eos(self.vocabulary)
            eos = tuple(sorted(ends, key=lambda token: (token != eos_token, token)))
        else:
            stated = self.metadata("tokenizer.ggml.eos_token_id")
            eos = (int(stated),) if stated is not None and stated.isdigit() and int(stated) < tokens else ()
        return GgufFacts(
            architecture, tokens, number("context_length") or 0, number("attention.key_length") or size,
            number("attention.value_length") or size, eos,
            sum(of_layers) * (layers if len(of_layers) == 1 else 1), has_tokenizer, self._unsupported(architecture),
        )  # fmt: skip

    def _unsupported(self, architecture: str) -> str | None:
        """Return the reason why streams of this model cannot be compared; None if they can."""
        calls = self.library.calls
        if calls.llama_model_has_encoder(self.handle):
            return "models with an encoder have no streams to compare"
        if calls.llama_model_is_recurrent(self.handle) or calls.llama_model_is_hybrid(self.handle):
            return "recurrent models keep no cache of the prompt's entries"
        return NOT_CAUSAL if self.metadata(f"{architecture}.attention.causal") == "false" else None


@functools.lru_cache(maxsize=64)
def _facts(file: Path, size: int, modified: int) -> GgufFacts:  # noqa: ARG001 - distinguish two contents of a path
    return Weights(file, vocabulary_only=True).facts


def gguf_facts(file: Path) -> GgufFacts:
    """Return the facts about the model of a GGUF file, without reading its weights."""
    check_is_gguf(file)
    state = file.stat()
    return _facts(file, state.st_size, state.st_mtime_ns)


def check_is_gguf(file: Path) -> None:
    """Raise an error if a file is not a GGUF file, before the library opens it."""
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_MAGIC))
    except IsADirectoryError:
        raise InputError(f"{file}: is a folder; name the GGUF file in it") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if start != _MAGIC:
        raise InputError(f"{file}: is no GGUF file; llama.cpp's convert_hf_to_gguf.py makes one from a model's folder")


def check_decoded(result: int, call: str, library: Library) -> None:
    """Raise an error if ``result``, which ``llama_decode`` returned, is not 0; the error says that ``call`` failed."""
    if result:
        why = "its cache has no room" if result == 1 else library.last_words()
        raise OperationError(f"llama.cpp: {call} failed ({result}): {why}")


_CONTROL, _USER_DEFINED = 1 << 3, 1 << 4  # of llama.cpp's kinds of tokens
_TOKEN_BYTES = 16  # of the text of most tokens; a call that needs more returns the size


class GgufTokenizer:
    """The tokenizer of a GGUF file, with the methods of transformers' tokenizers that documents and pages use.

    ``weights`` need only have the vocabulary.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights, self._calls = weights, weights.library.calls
        template = self._calls.llama_model_chat_template(weights.handle, None)
        self.chat_template: str | None = None if template is None else template.decode()

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if llama.cpp calls a token of plain text BOS, as it does for a file that names no BOS."""
        token = int(self._calls.llama_vocab_bos(self._weights.vocabulary))
        return token if token >= 0 and self._calls.llama_vocab_is_control(self._weights.vocabulary, token) else None

    @functools.cached_property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The control and user-defined tokens by id, in transformers' form; in a text, they are never split."""
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
            flags = add_special_tokens, not split_special_tokens
            count = self._calls.llama_tokenize(self._weights.vocabulary, encoded, len(encoded), ids, room, *flags)
            if count >= 0:
                return {"input_ids": list(ids[:count])}
            room = -count

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        """Write a conversation by the file's chat template or, with ``tools``, by its template for tools if any."""
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
        """Return the text of some tokens, without ids that the file does not have, on which llama.cpp aborts."""
        tokens = [token for token in tokens if self._has(token)]
        ids = (c_int32 * len(tokens))(*tokens)
        room = _TOKEN_BYTES * len(tokens) + 1
        while True:
            text = ctypes.create_string_buffer(room)
            flags = False, not skip_special_tokens  # whether special tokens are left out, and whether they are written
            length = self._calls.llama_detokenize(self._weights.vocabulary, ids, len(tokens), text, room, *flags)
            if length >= 0:
                return text.raw[:length].decode(errors="replace")
            room = -length

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token by its name in the file; of tokens with the same name, the largest id."""
        return {name.decode(errors="replace"): token for token, name in enumerate(self.names())}

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return a token's name in the file; None of an id that the file does not have."""
        return self._text(token) if self._has(token) else None

    def _has(self, token: int) -> bool:
        return 0 <= token < int(self._calls.llama_vocab_n_tokens(self._weights.vocabulary))

    def names(self) -> list[bytes]:
        """Return the name of each token in the file, in the order of ids."""
        vocabulary = self._weights.vocabulary
        count = self._calls.llama_vocab_n_tokens(vocabulary)
        return [self._calls.llama_vocab_get_text(vocabulary, token) or b"" for token in range(count)]

    def _text(self, token: int | None) -> str:
        name = None if token is None else self._calls.llama_vocab_get_text(self._weights.vocabulary, token)
        return (name or b"").decode(errors="replace")


def load_gguf_tokenizer(file: Path) -> GgufTokenizer | None:
    """Load the tokenizer of a GGUF file; None if the file has none."""
    check_is_gguf(file)
    return _loaded_tokenizer(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _loaded_tokenizer(file: Path, _modified: int) -> GgufTokenizer | None:
    weights = Weights(file, vocabulary_only=True)
    return GgufTokenizer(weights) if weights.facts.has_tokenizer else None


def gguf_tokenizer_sha256(file: Path) -> str:
    """Return the SHA-256, in hexadecimal, of the names of a GGUF file's tokens and of its chat template."""
    tokenizer = load_gguf_tokenizer(file)
    if tokenizer is None:
        raise InputError(f"{file}: has no tokenizer")
    content = [[name.hex() for name in tokenizer.names()], tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
