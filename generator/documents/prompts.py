"""Turn a prompt's text into token ids, with or without the model's chat template."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from schema.errors import InputError

_CLOSE_ENOUGH = 0.99  # of the bound: the search stops there
_TEMPLATE_DATE = "26 Jul 2024"  # some chat templates print a date: a document must not change with the day


class Tokenizer(Protocol):
    """The part of transformers' tokenizer interface that documents use."""

    chat_template: Any

    def __call__(self, _text: str, /, **options: bool) -> Mapping[str, list[int]]:
        """Tokenize a text; the token ids are under ``input_ids``."""

    def apply_chat_template(self, _conversation: list[dict[str, str]], /, **options: Any) -> Any:
        """Write a conversation in the model's own form."""


@dataclass(frozen=True)
class PromptText:
    """A prompt as text: a question or instruction, and the beginning of the answer in a plain prompt and in a chat.

    A chat may have a system's message.
    """

    text: str
    plain_opening: str = ""
    chat_opening: str = ""
    system: str | None = None

    def tokens(self, tokenizer: Tokenizer, *, chat: bool) -> tuple[int, ...]:
        """Return the token ids, with the special tokens of the tokenizer or its chat template."""
        if not chat:
            ids = tokenizer(self.text + self.plain_opening, add_special_tokens=True, verbose=False)["input_ids"]
            return tuple(ids)
        if tokenizer.chat_template is None:
            raise InputError("chat_template = true, but the model's tokenizer has no chat template")
        user = [{"role": "user", "content": self.text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            opened = _opened(tokenizer, system + user)
        except TemplateError:  # some templates refuse a system's message
            opened = _opened(tokenizer, user)
        ids = tokenizer(opened + self.chat_opening, add_special_tokens=False, verbose=False)["input_ids"]
        return tuple(ids)


def _opened(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string=_TEMPLATE_DATE
    )
    return text


def longest_prompt(
    compose: Callable[[int], PromptText], tokenizer: Tokenizer, *, chat: bool, tokens: int, least: int,
    most: int | None = None,
) -> tuple[PromptText, tuple[int, ...]] | None:  # fmt: skip
    """Find the prompt with the most parts that fits into ``tokens`` tokens; None if even ``least`` parts do not fit.

    ``compose`` returns the prompt with a number of parts; more parts make a longer prompt. The search stops at 99% of
    the tokens. The prompt comes with its token ids.
    """

    def measured(parts: int) -> tuple[PromptText, tuple[int, ...]]:
        prompt = compose(parts)
        return prompt, prompt.tokens(tokenizer, chat=chat)

    fits, found = least, measured(least)
    if (used := len(found[1])) > tokens:
        return None
    too_many = math.inf if most is None else most + 1
    per_part = used / max(least, 1)
    while too_many - fits > 1 and used < _CLOSE_ENOUGH * tokens:
        # By the slope so far, inside the bracket; at most eightfold, since the slope may be wrong.
        guess = fits + max(int((tokens - used) / per_part), 1)
        guess = int(min(guess, 8 * max(fits, 1), too_many - 1))
        tried = measured(guess)
        per_part = max((len(tried[1]) - used) / (guess - fits), 0.25)
        if len(tried[1]) > tokens:
            too_many = guess
        else:
            fits, found, used = guess, tried, len(tried[1])
    return found
