"""The tokens that end a text: where each is named, and the token by which a chat template ends an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

_ANSWER = "kvdrift's answer"
_CONVERSATION = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": _ANSWER}]


@dataclass(frozen=True)
class TextEnds:
    """The tokens that end a text, one set for both sides (definitions, "Ends and beginnings").

    ``places`` has for each token the places that name it. The first token fills the positions after a side's end.
    """

    places: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, named: Iterable[tuple[int, str]], vocabulary: int) -> Self:
        """Join tokens with the place that names each, without tokens that a vocabulary of this size lacks."""
        places: dict[int, tuple[str, ...]] = {}
        for token, place in named:
            if 0 <= token < vocabulary and place not in places.get(token, ()):
                places[token] = (*places.get(token, ()), place)
        return cls(places)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens' ids, the first being the token that fills."""
        return tuple(self.places)


def template_end(tokenizer: Any) -> int | None:
    """Return the special token that a tokenizer's chat template writes right after an assistant's last message.

    White space may stand between the two. The message is the conversation's last, since some templates end messages
    before the last in another way (GPT-OSS: ``<|end|>`` after a thought, ``<|return|>`` at the end). None without a
    template, if the template refuses the conversation, or if it writes no special token there.
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
