"""Turn a prompt's text into token ids, with or without the model's chat template."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvdrift.generator.documents.conversations import SYSTEM, USER, Conversation
from kvdrift.generator.documents.special_tokens import Tokenizer, plain_tokens, prompt_controls
from kvdrift.schema.document import Document

__all__ = ["PromptText", "Tokenizer", "longest_prompt"]

_CLOSE_ENOUGH = 0.99  # of the bound: the search stops there


@dataclass(frozen=True)
class PromptText:
    """A prompt as text: a question or instruction, and the beginning of the answer in a plain prompt and in a chat.

    A chat may have a system's message.
    """

    text: str
    plain_opening: str = ""
    chat_opening: str = ""
    system: str | None = None

    def tokens(self, tokenizer: Tokenizer, *, chat: bool = False) -> tuple[int, ...]:
        """Return the token ids, with the special tokens of the tokenizer or its chat template."""
        if chat:
            return self._conversation(tokenizer).tokens(tokenizer)
        return tuple(plain_tokens(tokenizer, self.text + self.plain_opening))

    def described(self, document: Document, tokenizer: Tokenizer, *, chat: bool = False) -> Document:
        """Return this prompt's document with its turns and the control tokens in its text."""
        if chat:
            return self._conversation(tokenizer).described(document, tokenizer)
        return replace(document, control_tokens=prompt_controls(tokenizer, self.text + self.plain_opening))

    def _conversation(self, tokenizer: Tokenizer) -> Conversation:
        user = Conversation([{"role": USER, "content": self.text}], opening=self.chat_opening)
        if self.system is None:
            return user
        whole = replace(user, messages=[{"role": SYSTEM, "content": self.system}, *user.messages])
        return whole if whole.accepted(tokenizer) else user  # some templates refuse a system's message


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
