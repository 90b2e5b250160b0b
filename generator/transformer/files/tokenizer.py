"""Load a model's tokenizer, without the model."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import file_exists

from kvdrift.generator.llama_cpp.gguf import load_gguf_tokenizer
from kvdrift.generator.transformer.files.configuration import library, quiet, read_configuration
from kvdrift.generator.transformer.files.local_folders import (
    EMBEDDED_ID,
    local_folder,
    model_folder,
    model_source,
    tokenizer_of,
)
from kvdrift.schema.errors import InputError
from kvdrift.schema.study.model import GGUF
from kvdrift.schema.token_texts import text_of_bytes


def load_tokenizer(model_id: str, *, revision: str | None = None) -> Any:
    """Load a model's tokenizer for prompts of text; raise an error if it has none."""
    if model_id.endswith(GGUF):
        gguf_tokenizer = load_gguf_tokenizer(Path(model_id))
        if gguf_tokenizer is None:
            raise InputError(f"{model_id}: has no tokenizer; name one by model.tokenizer, a folder or Hugging Face id")
        return gguf_tokenizer
    if model_id == EMBEDDED_ID:
        raise InputError(f"model.id = '{model_id}': takes documents of the embedded source only, not text")
    read_configuration(model_id, revision)  # refuses an id that names no model
    with quiet():
        tokenizer = _tokenizer(model_id, revision)
    if tokenizer is None:
        raise InputError(f"model.id = '{model_id}': has no tokenizer, which prompts of text need")
    return tokenizer


def token_reader(model_id: str, *, revision: str | None = None) -> Callable[[int], str] | None:
    """Return a function from a token to its text; None if the tokenizer cannot be loaded.

    Bytes that are no character by themselves are written in hexadecimal, as ``whole_texts`` reads them. The text of a
    token without one, such as an id that the tokenizer does not have, is its number.
    """
    tokenizer = known_tokenizer(model_id, revision)
    return None if tokenizer is None else functools.partial(_token_text, tokenizer)


def token_texts(model_id: str, *, revision: str | None = None) -> dict[int, str] | None:
    """Return the text of every token by its id, as ``token_reader`` gives it; None if no tokenizer can be loaded."""
    tokenizer = known_tokenizer(model_id, revision)
    if tokenizer is None:
        return None
    return {token: _token_text(tokenizer, token) for token in sorted(set(tokenizer.get_vocab().values()))}


_REPLACED = "\ufffd"  # what decoders write for bytes that are no character
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")  # a byte's token in a SentencePiece vocabulary with byte fallback
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(256)} - {*_PRINTED})
_SIGNS = {chr(byte): byte for byte in _PRINTED} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The byte that each sign stands for in the names of GPT-2's tokens, and of all byte-level vocabularies since."""


def _token_text(tokenizer: Any, token: int) -> str:
    # Some decoders leave out a space at the beginning of a text, so a token that is only a space is decoded twice.
    text = str(tokenizer.decode([token]) or tokenizer.decode([token, token]) or token)
    if _REPLACED not in text:
        return text
    name = str(tokenizer.convert_ids_to_tokens(token))
    if (byte := _BYTE_NAME.fullmatch(name)) is not None:
        return text_of_bytes(bytes.fromhex(byte[1]))
    return text_of_bytes(bytes(map(_SIGNS.__getitem__, name))) if _SIGNS.keys() >= {*name} else text


def text_decoder(
    model_id: str, *, revision: str | None = None
) -> Callable[[Sequence[tuple[int, ...]]], list[str]] | None:
    """Return a function from continuations to their texts; None if the tokenizer cannot be loaded.

    Special tokens are left out and spaces are not cleaned up, so texts are as servers send them.
    """
    tokenizer = known_tokenizer(model_id, revision)
    if tokenizer is None:
        return None

    def decode(continuations: Sequence[tuple[int, ...]]) -> list[str]:
        return [
            str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
            for tokens in continuations
        ]

    return decode


def tokens_sha256(model_id: str, *, revision: str | None = None) -> str | None:
    """Return a digest of a tokenizer's tokens and of how it cuts texts; None if it cannot be loaded.

    Chat templates and the marks of special tokens are left out, so files that differ only in these have equal digests.
    """
    tokenizer = known_tokenizer(model_id, revision)
    if tokenizer is None:
        return None
    content: list[Any] = [sorted(tokenizer.get_vocab().items())]
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        parts = json.loads(fast.to_str())
        content += [parts.get(name) for name in ("normalizer", "pre_tokenizer", "model")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def known_tokenizer(model_id: str, revision: str | None) -> Any:
    """Return a model's tokenizer, or that of a GGUF file; None if it cannot be loaded."""
    model_id = tokenizer_of(model_id)
    if model_id.endswith(GGUF):
        try:
            return load_gguf_tokenizer(Path(model_id))
        except InputError:
            return None
    if (
        local_folder(model_id) is None
        and model_folder(model_id, revision) is None
        and not is_on_hub(model_id, revision)
    ):
        return None
    try:
        with quiet():
            return _tokenizer(model_id, revision)
    except InputError:
        return None


@functools.cache
def is_on_hub(model_id: str, revision: str | None) -> bool | None:
    """Return whether a hub has the model; None if no hub answers, or it refuses this user.

    A process asks once for each model: to load a missing tokenizer without this check would ask the hub many times.
    """
    try:
        return file_exists(model_id, "config.json", revision=revision)  # without trying again, as a download would
    except Exception:  # noqa: BLE001 - no connection, no access, an id that no model can have: each library its own
        return None


def _tokenizer(model_id: str, revision: str | None) -> Any:
    source = model_source(model_id)
    try:
        tokenizer: Any = library().AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - each kind of tokenizer fails in its own way, the library's panics among them
        return None
    # Where there are no files, some architectures' tokenizers are made up: they know special tokens only.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None
