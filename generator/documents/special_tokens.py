"""The special tokens of a tokenizer: the token that begins a text, and control tokens that stand in a text.

A prompt begins with at most one BOS, whether its text, its chat template or the tokenizer writes the BOS. A tokenizer
may also append an EOS to texts, for training; a prompt never ends with such an EOS, since it would end the text that
the model is to continue.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of transformers' tokenizer interface that documents use."""

    @property
    def chat_template(self) -> Any:
        """The chat template, or several by their names; None without one."""

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if the tokenizer has none."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens that are found in a text before it is cut, by id: control tokens have ``special``."""

    def __hash__(self) -> int:
        """Return a number of this object, by which its special tokens are kept."""

    def __call__(self, _text: str, /, **options: bool) -> Mapping[str, list[int]]:
        """Tokenize a text; the token ids are under ``input_ids``."""

    def apply_chat_template(self, _conversation: list[dict[str, Any]], /, **options: Any) -> Any:
        """Write a conversation in the model's own form."""


def text_tokens(tokenizer: Tokenizer, text: str, *, controls: bool = True) -> list[int]:
    """Return the token ids of a text alone; without ``controls``, control tokens in it are cut like other text."""
    options = {"add_special_tokens": False, "split_special_tokens": not controls, "verbose": False}
    return list(tokenizer(text, **options)["input_ids"])


def plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a prompt without a chat template, which begins as the tokenizer begins texts."""
    prefix = list(_prefix(tokenizer))
    begun = begun_once(tokenizer, text_tokens(tokenizer, text))
    return begun if begun[: len(prefix)] == prefix else prefix + begun


def begun_once(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Return token ids without repetitions of the beginning: BOS, or what the tokenizer puts before texts."""
    bos = tokenizer.bos_token_id
    start = [*_prefix(tokenizer)] or ([] if bos is None else [bos])
    while start and tokens[: 2 * len(start)] == 2 * start:
        tokens = tokens[len(start) :]
    return tokens


@functools.lru_cache(maxsize=8)
def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before a text; those that it appends are left out."""
    alone = text_tokens(tokenizer, "a")
    whole = list(tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"])
    # From the end, so that all are a prefix if the tokenizer has no token for the letter.
    starts = range(len(whole) - len(alone), -1, -1)
    return next((tuple(whole[:start]) for start in starts if whole[start : start + len(alone)] == alone), ())


def template_text(tokenizer: Tokenizer) -> str:
    """Return the text of a tokenizer's chat template, or of all of them; empty without one."""
    templates = tokenizer.chat_template
    return "\0".join(map(str, templates.values())) if isinstance(templates, Mapping) else templates or ""


@functools.lru_cache(maxsize=8)
def control_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the ids of a tokenizer's control tokens by their texts.

    Added tokens that are not marked as special count, too, if the chat template writes them: such a token may end a
    turn. White space does not count.
    """
    written = template_text(tokenizer)
    return {
        token.content: id_
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content in written and not token.content.isspace())
    }


@functools.lru_cache(maxsize=8)
def control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern that finds a tokenizer's control tokens in a text, the longest at each place."""
    longest_first = sorted(control_tokens(tokenizer), key=len, reverse=True)
    if not longest_first:
        return re.compile(r"(?!)")  # which is nowhere
    # Looking at the first character first: some tokenizers have thousands of control tokens.
    first = "".join(sorted({re.escape(name[0]) for name in longest_first}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, longest_first))})")


def controls_in(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[str, ...]:
    """Return every occurrence of a control token in some texts, in order."""
    pattern = control_pattern(tokenizer)
    return tuple(found.group() for text in texts for found in pattern.finditer(text))


def prompt_controls(tokenizer: Tokenizer, text: str) -> tuple[str, ...]:
    """Return the control tokens in a prompt without a chat template, but for a BOS that only the text can write."""
    found = controls_in(tokenizer, [text])
    begins = bool(found) and text.startswith(found[0]) and not _prefix(tokenizer)
    return found[1:] if begins and control_tokens(tokenizer)[found[0]] == tokenizer.bos_token_id else found
