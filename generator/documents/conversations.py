"""Conversations as prompts: the model's own chat template writes them, and what users wrote stays text.

The template's control tokens, such as the one that ends a turn, are tokens. The same text in a message, tool or opening
is cut like any other text, since a message must not end its turn. Such texts are marked before the template writes the
conversation. If there are none, the tokens are those of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from jinja2 import TemplateError

from kvdrift.generator.documents.special_tokens import (
    Tokenizer,
    begun_once,
    control_pattern,
    control_tokens,
    controls_in,
    template_text,
    text_tokens,
)
from kvdrift.schema.document import Document, Turn
from kvdrift.schema.errors import InputError

Message = Mapping[str, Any]
"""A message of a conversation, as chat templates read it: ``role``, ``content``, and others such as ``tool_calls``."""

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
TEMPLATE_DATE: Final = "26 Jul 2024"
"""Some chat templates print the day's date; a document must not change with the day."""


class TemplateRefusalError(InputError):
    """A chat template refuses a conversation."""


@dataclass(frozen=True, eq=False)
class TokenizerWithVariables:
    """A tokenizer whose chat template gets further variables, such as ``enable_thinking``, each of which it reads."""

    tokenizer: Tokenizer
    variables: Mapping[str, Any]

    def __post_init__(self) -> None:
        templates = template_text(self.tokenizer)
        for name in self.variables:
            if not re.search(rf"\b{re.escape(name)}\b", templates):
                raise InputError(
                    f"model.chat_template_kwargs: the model's chat template does not read '{name}'; remove it"
                )

    @property
    def chat_template(self) -> Any:
        """The tokenizer's chat template; None if it has none."""
        return self.tokenizer.chat_template

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if the tokenizer has none."""
        return self.tokenizer.bos_token_id

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokenizer's added tokens by id."""
        return self.tokenizer.added_tokens_decoder

    def __call__(self, text: str, /, **options: bool) -> Mapping[str, list[int]]:
        """Tokenize a text."""
        return self.tokenizer(text, **options)

    def apply_chat_template(self, conversation: list[dict[str, Any]], /, **options: Any) -> Any:
        """Write a conversation, with the variables."""
        return self.tokenizer.apply_chat_template(conversation, **(options | dict(self.variables)))


@dataclass(frozen=True)
class Conversation:
    """Messages, the last of which the model answers; the tools that it may call; and the beginning of its answer."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    opening: str = ""

    def tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the token ids, with the special tokens of the chat template.

        Raises:
            TemplateRefusalError: the template refuses the messages.
        """
        marked = self._marked(tokenizer)
        return tuple(begun_once(tokenizer, marked.encoded(tokenizer, marked.written(tokenizer))))

    def accepted(self, tokenizer: Tokenizer) -> bool:
        """Tell whether the chat template takes the messages."""
        try:
            self._marked(tokenizer).written(tokenizer)
        except TemplateRefusalError:
            return False
        return True

    def described(self, document: Document, tokenizer: Tokenizer) -> Document:
        """Return this conversation's document with its turns, and the control tokens in what users wrote."""
        controls = controls_in(tokenizer, [*self._texts()])
        return replace(document, templated=True, turns=self.turns(tokenizer), control_tokens=controls)

    def turns(self, tokenizer: Tokenizer) -> tuple[Turn, ...]:
        """Return where each message's turn begins in the tokens; () if the template changes what messages say.

        A turn begins with the header that the template writes, after the end of the turn before. The last one is the
        assistant's, which the model is to write. Messages that the template leaves out have no turn.
        """
        marked = self._marked(tokenizer)
        text = marked.written(tokenizer)
        try:
            begins = _turn_begins(marked, tokenizer, text)
        except TemplateRefusalError:  # of messages with marks, for what they then begin with
            return ()
        whole = marked.encoded(tokenizer, text)
        repeated = len(whole) - len(begun_once(tokenizer, whole))
        turns, at, before = [], 0, 0
        for role, begin in begins:
            piece = marked.encoded(tokenizer, text[before:begin])
            if whole[at : at + len(piece)] == piece:
                at += len(piece)
            else:  # the piece is cut otherwise where it stands
                at = _common(whole, marked.encoded(tokenizer, text[:begin]))
            before = begin
            turns.append(Turn(role, max(at - repeated, 0) + 1))
        return tuple(turns)

    def _texts(self) -> Iterator[str]:
        yield from _strings([*self.messages])
        yield from _strings([*(self.tools or ())])
        yield self.opening

    def _marked(self, tokenizer: Tokenizer) -> _Marked:
        everything = "\n".join(self._texts())
        stem = next(stem for n in itertools.count() if (stem := f"kvdrift{n}q") not in everything)
        pattern = control_pattern(tokenizer)

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(f"{stem}o\\g<0>{stem}c", value)
            if isinstance(value, Mapping):
                return {name: entry if name == "role" else mark(entry) for name, entry in value.items()}
            return [mark(entry) for entry in value] if isinstance(value, list | tuple) else value

        tools = None if self.tools is None else mark([*self.tools])
        return _Marked(stem, mark([*self.messages]), tools, mark(self.opening))


@dataclass(frozen=True)
class _Marked:
    """A conversation whose texts have marks around control tokens; the marks begin with a stem that no text has."""

    stem: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    opening: str

    def written(self, tokenizer: Tokenizer) -> str:
        """Return the conversation as the template writes it, opened for the answer, with the marks."""
        return self.rendered(tokenizer, self.messages, opened=True) + self.opening

    def rendered(self, tokenizer: Tokenizer, messages: list[dict[str, Any]], *, opened: bool) -> str:
        """Return messages as the template writes them."""
        if tokenizer.chat_template is None:
            raise InputError("the model's tokenizer has no chat template, which chat_template = true and messages need")
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opened, "date_string": TEMPLATE_DATE}
        if self.tools is not None:
            options["tools"] = self.tools
        try:
            return str(tokenizer.apply_chat_template(messages, **options))
        except TemplateError as error:
            raise TemplateRefusalError(f"the chat template refuses the messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            message = f"the chat template cannot write the messages: {type(error).__name__}: {error}"
            raise TemplateRefusalError(message) from None

    @functools.cached_property
    def _around(self) -> re.Pattern[str]:
        """Finds a marked control token, or a mark that a template has parted from it."""
        stem = self.stem
        return re.compile(rf"{stem}o((?:(?!{stem}).)*){stem}c|{stem}[oc]", re.DOTALL)

    def encoded(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the token ids of marked text: marked control tokens are cut like other text."""
        first, *pieces = self._around.split(text)
        tokens = text_tokens(tokenizer, first)
        for number, piece in enumerate(pieces):
            if piece and number % 2:  # between marked control tokens
                tokens += _inner_tokens(tokenizer, piece)
            elif piece:
                cut = _inner_tokens(tokenizer, piece, controls=False)
                whole = control_tokens(tokenizer).get(piece) in cut  # a token that is not marked as special
                tokens += _inner_tokens(tokenizer, piece[:1]) + _inner_tokens(tokenizer, piece[1:]) if whole else cut
        return tokens


def _inner_tokens(tokenizer: Tokenizer, text: str, *, controls: bool = True) -> list[int]:
    """Return the tokens of a text that stands inside of another.

    Some tokenizers put a space before what begins a text, so the text is cut behind a character that stays apart from
    it, if there is one.
    """
    for before in ("\n", ".", "a", "1"):
        first, cut = text_tokens(tokenizer, before), text_tokens(tokenizer, before + text, controls=controls)
        if cut[: len(first)] == first:
            return cut[len(first) :]
    return text_tokens(tokenizer, text, controls=controls)


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in messages or tools; names of fields are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def _turn_begins(marked: _Marked, tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
    """Return the role of each turn and the character of ``text`` at which it begins, rising."""
    stem = marked.stem
    located = [_located(message, f"{stem}{number}:", f"{stem}:") for number, message in enumerate(marked.messages)]
    places = re.compile(rf"{stem}(\d*):")
    opened = marked.rendered(tokenizer, located, opened=True) + marked.opening
    if places.sub("", opened) != text:
        return []
    spans, end, removed = list[tuple[int, int, str]](), 0, 0  # from the end of the span before to the begin of one
    for found in places.finditer(opened):
        at = found.start() - removed
        removed += len(found.group())
        if found.group(1):
            spans.append((end, at, str(marked.messages[int(found.group(1))]["role"])))
        end = at
    if not spans:
        return []
    closed = marked.rendered(tokenizer, located, opened=False)
    *_, last = places.finditer(closed)
    closing = closed[last.end() :].strip()
    pattern = control_pattern(tokenizer)
    begins = list[tuple[str, int]]()
    for before, begin, role in spans:
        gap = text[before:begin]
        if before == 0 and not begins:
            written = gap.rfind(closing) if closing else -1  # a system's message that the template wrote by itself
            if written >= 0:
                begins.append((SYSTEM, 0))
            start = _after(gap, written + len(closing)) if written >= 0 else 0
        else:
            start = _next_header(gap, closing, pattern)
        begins.append((role, before + start))
    start = end + _next_header(text[end:], closing, pattern)
    return [*begins, (ASSISTANT, start)] if start < len(text) else begins


def _located(message: Message, begin: str, end: str) -> dict[str, Any]:
    """Return a message with marks around its content, or around the name of its first tool if it has no content."""
    content = message.get("content")
    if isinstance(content, str) and (core := content.strip()):
        before, _, after = content.partition(core)
        return {**message, "content": f"{before}{begin}{core}{end}{after}"}
    copied: dict[str, Any] = copy.deepcopy(dict(message))
    called = copied.get("tool_calls") or [{}]
    tool = called[0].get("function", called[0])
    if isinstance(tool, dict) and isinstance(tool.get("name"), str):
        tool["name"] = f"{begin}{tool['name']}{end}"
    return copied


def _next_header(gap: str, closing: str, controls: re.Pattern[str]) -> int:
    """Return where, between two messages' texts, the header of the second one begins.

    The first one's turn ends with the text that closes the last message of all or, if the template closes it otherwise,
    with a control token; white space after it belongs to it.
    """
    closed = gap.find(closing)
    if closed >= 0:
        return _after(gap, closed + len(closing))
    found = controls.search(gap)
    return len(gap) if found is None else _after(gap, found.end())


def _after(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _common(whole: Sequence[int], beginning: Sequence[int]) -> int:
    pairs = enumerate(zip(whole, beginning, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(whole), len(beginning)))
