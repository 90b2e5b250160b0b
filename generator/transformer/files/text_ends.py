"""The tokens that end the texts of a study: those that its model names, its chat template's, or ``[study] eos``.

A model names such tokens in its files on this machine, or its engine reports them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from huggingface_hub import hf_hub_download

from kvdrift.generator.documents.registry import applies_template
from kvdrift.generator.embedded.vocabulary import SYMBOLS
from kvdrift.generator.identity import ModelIdentity
from kvdrift.generator.llama_cpp.gguf import gguf_facts
from kvdrift.generator.transformer.files.configuration import vocabulary_size
from kvdrift.generator.transformer.files.fingerprints import model_identity, tokenizer_sha256
from kvdrift.generator.transformer.files.local_folders import (
    EMBEDDED_FOLDERS,
    local_configuration,
    local_folder,
    local_generation_configuration,
)
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.tokenizer import known_tokenizer, token_reader
from kvdrift.schema.errors import InputError, similar_name
from kvdrift.schema.study import Study
from kvdrift.schema.study.model import GGUF

_ANSWER = "kvdrift's answer"
_CONVERSATION = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": _ANSWER}]


@dataclass(frozen=True)
class TextEnds:
    """The tokens that end a text, one set for both sides (``docs/models.md``).

    ``places`` has for each token the places, such as files, that name it. The first token fills the positions after a
    side's end.
    """

    places: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, named: Iterable[tuple[int, str]], vocabulary: int) -> Self:
        """Group pairs of a token and a place that names it, by token; drop tokens that the vocabulary lacks."""
        places: dict[int, tuple[str, ...]] = {}
        for token, place in named:
            if 0 <= token < vocabulary and place not in places.get(token, ()):
                places[token] = (*places.get(token, ()), place)
        return cls(places)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens' ids; the first fills the positions after a side's end."""
        return tuple(self.places)


def template_end(tokenizer: Any) -> int | None:
    """Return the special token that a tokenizer's chat template writes right after an assistant's last message.

    White space may stand between the two. The message is the conversation's last, since some templates end messages
    before the last in another way (GPT-OSS: ``<|end|>`` after a thought, ``<|return|>`` at the end). The result
    is None if there is no template, or it refuses the conversation, or it writes no special token there.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        text: str = tokenizer.apply_chat_template(_CONVERSATION, tokenize=False, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - each template fails in its own way, and prompts may still go through it
        return None
    after = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    tokens = tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"] if after else []
    return tokens[0] if tokens and tokens[0] in tokenizer.added_tokens_decoder else None


NamedToken = tuple[int, str]
"""A token that ends a text, and the place that names it."""

GENERATION = "generation_config.json"
ENDS_OF_LLAMA_CPP = "llama.cpp's ends of generation"
_CONFIGURATION, _TOKENIZER, _TEMPLATE, _STUDY = "config.json", "the tokenizer's EOS", "the chat template", "study.eos"


def model_files(study: Study) -> ModelIdentity:
    """Return the fingerprints and end tokens of a transformer study's model, from the files on this machine."""
    files = model_identity(model_location(study.model), study.model.revision)
    return files if files.weights_sha256 is None else replace(files, eos_tokens=text_ends(study).tokens)


def text_ends(study: Study) -> TextEnds:
    """Return the tokens that end the texts of a transformer's study, from the files on this machine."""
    location, revision = model_location(study.model), study.model.revision
    vocabulary = vocabulary_size(location, revision=revision)
    return joined_ends(study, vocabulary, model_ends(location, revision), location)


def joined_ends(study: Study, vocabulary: int, named: Sequence[NamedToken], tokenizer: str) -> TextEnds:
    """Join the tokens ``named`` by a model with the token of a chat template in use; ``[study] eos`` replaces them all.

    The template is that of the tokenizer at place ``tokenizer``. Its token comes first, since it ends most answers.
    """
    location, revision = tokenizer, study.model.revision
    if study.study.eos is not None:
        chosen = [_chosen(entry, location, revision, vocabulary) for entry in study.study.eos]
        return TextEnds.of([(token, _STUDY) for token in chosen], vocabulary)
    end = None
    if any(applies_template(section) for section in study.documents):
        end = _of_tokenizer(location, revision, _digest(location, revision))[1]
    return TextEnds.of([*([] if end is None else [(end, _TEMPLATE)]), *named], vocabulary)


def model_ends(location: str, revision: str | None = None) -> list[NamedToken]:
    """Return the tokens named by a model's files, or by llama.cpp for a GGUF file; [] if no files are here.

    A named token may be missing in the vocabulary.
    """
    if location.endswith(GGUF):
        return [(token, ENDS_OF_LLAMA_CPP) for token in gguf_facts(Path(location)).eos_tokens]
    named = configured_ends(location, revision)
    digest = _digest(location, revision)
    if digest is not None and location not in EMBEDDED_FOLDERS:  # the embedded model's EOS is in its configuration
        eos = _of_tokenizer(location, revision, digest)[0]
        named += [] if eos is None else [(eos, _TOKENIZER)]
    return named


def configured_ends(location: str, revision: str | None = None) -> list[NamedToken]:
    """Return the tokens that a model's configurations name."""
    contents = (
        (GENERATION, local_generation_configuration(location, revision)),
        (_CONFIGURATION, local_configuration(location, revision) or {}),
    )
    return [(token, file) for file, content in contents for token in _tokens(location, content.get("eos_token_id"))]


def check_ends(study: Study, action: str, ends: TextEnds, action_tokens: Iterable[int]) -> None:
    """Raise an error if ``action_tokens``, which end an action's texts, are not all in ``ends``.

    With ``[study] eos`` the study file sets the tokens of both sides, and nothing is checked.
    """
    others = [token for token in dict.fromkeys(action_tokens) if token not in ends.tokens]
    if others and study.study.eos is None:
        joined = ", ".join(map(str, (*ends.tokens, *others)))
        raise InputError(
            f"action '{action}': its weights end a text also at tokens {others}, those of the reference only at "
            f"{[*ends.tokens]}: both sides must end at the same tokens; write eos = [{joined}] under [study]"
        )


def fetch_generation_configuration(location: str, revision: str | None) -> None:
    """Download a Hugging Face id's generation configuration, if it has one, but not its weights."""
    if local_folder(location) is None and not location.endswith(GGUF):
        with contextlib.suppress(Exception):  # no connection, no access, no such file: each library's own
            hf_hub_download(location, GENERATION, revision=revision)


def absent_ends(location: str, revision: str | None = None) -> tuple[int, ...]:
    """Return the end tokens that a model's configurations name and its vocabulary lacks."""
    named = dict.fromkeys(token for token, _ in configured_ends(location, revision))
    size = (local_configuration(location, revision) or {}).get("vocab_size")
    return tuple(token for token in named if type(size) is int and not 0 <= token < size)


def end_texts(ends: TextEnds, location: str, revision: str | None) -> Iterator[str]:
    """Yield a description of each token: its id, its text if the tokenizer is here, and the places that name it."""
    embedded = location in EMBEDDED_FOLDERS  # its tokenizer takes seconds to load
    read = SYMBOLS.__getitem__ if embedded else token_reader(location, revision=revision)
    for token, places in ends.places.items():
        text = "" if read is None else f" '{read(token)}'"
        yield f"{token}{text} ({', '.join(places)})"


def _tokens(location: str, ids: Any) -> tuple[int, ...]:
    tokens = () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if not all(type(token) is int for token in tokens):
        raise InputError(f"model.id = '{location}': eos_token_id = {ids!r}: should be a token's id or a list of ids")
    return tokens


def _digest(location: str, revision: str | None) -> str | None:
    """Return a text that changes whenever a tokenizer's files change; None without files on this machine."""
    if location.endswith(GGUF):
        return str(Path(location).stat().st_mtime_ns)
    return tokenizer_sha256(location, revision)


@functools.lru_cache(maxsize=64)
def _of_tokenizer(location: str, revision: str | None, digest: str | None) -> tuple[int | None, int | None]:
    """Return a tokenizer's EOS, and the token by which its chat template ends an answer; None for a missing token."""
    tokenizer = None if digest is None else known_tokenizer(location, revision)
    if tokenizer is None:
        return None, None
    return getattr(tokenizer, "eos_token_id", None), template_end(tokenizer)


def _chosen(entry: int | str, location: str, revision: str | None, vocabulary: int) -> int:
    """Return the token that ``[study] eos`` names by its id or its text."""
    if isinstance(entry, int):
        if not 0 <= entry < vocabulary:
            raise InputError(f"study.eos: token {entry} is not in the vocabulary, which has {vocabulary:,} tokens")
        return entry
    tokenizer = known_tokenizer(location, revision)
    if tokenizer is None:
        raise InputError(f"study.eos = '{entry}': needs a tokenizer, which '{location}' lacks; write the token's id")
    named: int | None = tokenizer.get_vocab().get(entry)
    tokens = [named] if named is not None else tokenizer(entry, add_special_tokens=False)["input_ids"]
    if len(tokens) != 1:
        near = similar_name(entry, [str(name) for name in tokenizer.added_tokens_decoder.values()])
        hint = f"; did you mean '{near}'?" if near else ""
        raise InputError(f"study.eos = '{entry}': is {len(tokens)} tokens of the model, and should be one{hint}")
    if tokens[0] >= vocabulary:
        raise InputError(
            f"study.eos = '{entry}': is token {tokens[0]}, but the model's vocabulary has {vocabulary:,} tokens"
        )
    return int(tokens[0])
