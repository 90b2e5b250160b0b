"""Prompts as token ids: texts with the special tokens of a tokenizer, and conversations by a model's chat template.

A prompt begins with at most one BOS, whether its text, its chat template or the tokenizer writes the BOS. A tokenizer
may also append an EOS to texts, for training; a prompt never ends with such an EOS, since it would end the text that
the model is to continue.

A control token that a chat template writes, such as the end of a turn, becomes that token. The same text in a message,
tool or opening is tokenized like any other text, since a message must not end its turn. Such texts are marked before
the template writes the conversation. A conversation without control tokens in its texts has the tokens that
transformers' ``apply_chat_template`` gives it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from jinja2 import TemplateError

from kvdrift.schema.document import Document, Turn
from kvdrift.schema.errors import InputError


class Tokenizer(Protocol):
    """The part of transformers' tokenizer interface that documents use."""

    @property
    def chat_template(self) -> Any:
        """The text of the chat template, or a dict of several texts by name; None without a template."""

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS; None if the tokenizer has none."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id, objects with ``content`` and ``special``.

        A text is searched for added tokens before the rest of it is tokenized.
        """

    def __hash__(self) -> int:
        """Return a hash, so that this object can be the key of caches, such as that of its control tokens."""

    def __call__(self, _text: str, /, **options: bool) -> Mapping[str, list[int]]:
        """Tokenize a text; the token ids are under ``input_ids``."""

    def apply_chat_template(self, _conversation: list[dict[str, Any]], /, **options: Any) -> Any:
        """Write a conversation in the model's own form."""


def text_tokens(tokenizer: Tokenizer, text: str, *, controls: bool = True) -> list[int]:
    """Return the token ids of a text, with nothing added; if not ``controls``, control tokens are read as text."""
    options = {"add_special_tokens": False, "split_special_tokens": not controls, "verbose": False}
    return list(tokenizer(text, **options)["input_ids"])


def plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a prompt without a chat template, with the tokenizer's prefix once at their beginning."""
    prefix = list(_prefix(tokenizer))
    begun = begun_once(tokenizer, text_tokens(tokenizer, text))
    return begun if begun[: len(prefix)] == prefix else prefix + begun


def begun_once(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Return ``tokens``, cut so that they begin with the tokenizer's prefix at most once.

    If the tokenizer adds no prefix, BOS counts as the prefix.
    """
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
    """Return the text of a tokenizer's chat template, of all together if it has several; empty without a template."""
    templates = tokenizer.chat_template
    return "\0".join(map(str, templates.values())) if isinstance(templates, Mapping) else templates or ""


@functools.lru_cache(maxsize=8)
def control_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the ids of a tokenizer's control tokens by their texts.

    They are the tokens marked as special, and the added tokens that the chat template writes, since these may end a
    turn. An added token that is white space is left out unless it is special.
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
        return re.compile(r"(?!)")  # matches nowhere
    # Looking at the first character first: some tokenizers have thousands of control tokens.
    first = "".join(sorted({re.escape(name[0]) for name in longest_first}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, longest_first))})")


def controls_in(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[str, ...]:
    """Return every occurrence of a control token in some texts, in order."""
    pattern = control_pattern(tokenizer)
    return tuple(match.group() for text in texts for match in pattern.finditer(text))


def prompt_controls(tokenizer: Tokenizer, text: str) -> tuple[str, ...]:
    """Return the control tokens in a prompt without a chat template.

    A BOS at the beginning is left out if the tokenizer puts nothing before texts.
    """
    controls = controls_in(tokenizer, [text])
    begins = bool(controls) and text.startswith(controls[0]) and not _prefix(tokenizer)
    return controls[1:] if begins and control_tokens(tokenizer)[controls[0]] == tokenizer.bos_token_id else controls


Message = Mapping[str, Any]
"""A message of a conversation, as chat templates read it: ``role``, ``content``, and fields such as ``tool_calls``."""

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
TEMPLATE_DATE: Final = "26 Jul 2024"
"""The date that chat templates print in place of the day's date, since a document must not change with the day."""


class TemplateRefusalError(InputError):
    """A chat template refuses a conversation."""


class TokenizerWithVariables:
    """A tokenizer that gives its chat template further variables, such as ``enable_thinking``.

    A variable that the template does not read is refused.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        templates = template_text(tokenizer)
        for name in variables:
            if not re.search(rf"\b{re.escape(name)}\b", templates):
                raise InputError(
                    f"model.chat_template_kwargs: the model's chat template does not read '{name}'; remove it"
                )
        self._tokenizer, self._variables = tokenizer, variables
        self.chat_template, self.bos_token_id = tokenizer.chat_template, tokenizer.bos_token_id
        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def __call__(self, text: str, /, **options: bool) -> Mapping[str, list[int]]:
        """Tokenize a text."""
        return self._tokenizer(text, **options)

    def apply_chat_template(self, conversation: list[dict[str, Any]], /, **options: Any) -> Any:
        """Write a conversation by the chat template; the further variables take precedence over ``options``."""
        return self._tokenizer.apply_chat_template(conversation, **(options | dict(self._variables)))


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
        """Return whether the chat template takes the messages."""
        try:
            self._marked(tokenizer).written(tokenizer)
        except TemplateRefusalError:
            return False
        return True

    def described(self, document: Document, tokenizer: Tokenizer) -> Document:
        """Return ``document`` with this conversation's turns and the control tokens in its texts."""
        controls = controls_in(tokenizer, [*self._texts()])
        return replace(document, templated=True, turns=self.turns(tokenizer), control_tokens=controls)

    def turns(self, tokenizer: Tokenizer) -> tuple[Turn, ...]:
        """Return where each message's turn begins in the tokens; () if the template changes the content of messages.

        A turn begins with its header, which the template writes after the end of the turn before. The last turn is the
        assistant's, which the model is to write. Messages that the template leaves out have no turn.
        """
        marked = self._marked(tokenizer)
        text = marked.written(tokenizer)
        try:
            begins = _turn_begins(marked, tokenizer, text)
        except TemplateRefusalError:  # messages with marks begin with other text
            return ()
        whole = marked.encoded(tokenizer, text)
        repeated = len(whole) - len(begun_once(tokenizer, whole))
        turns, at, before = [], 0, 0
        for role, begin in begins:
            piece = marked.encoded(tokenizer, text[before:begin])
            if whole[at : at + len(piece)] == piece:
                at += len(piece)
            else:  # the piece is tokenized differently in its place
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
        """Return messages as the template writes them, followed by the assistant's header if ``opened``."""
        if tokenizer.chat_template is None:
            raise InputError(
                "the model's tokenizer has no chat template, which chat_template = true and messages need; write plain "
                "prompts, without chat_template"
            )
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
        """The pattern that finds a marked control token, or a mark that the template has separated from its token."""
        stem = self.stem
        return re.compile(rf"{stem}o((?:(?!{stem}).)*){stem}c|{stem}[oc]", re.DOTALL)

    def encoded(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the token ids of marked text: marked control tokens are tokenized like other text."""
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
    """Return the tokens that a text has in the middle of another text.

    Some tokenizers put a space before a text. So the text is tokenized after the first of four characters whose token
    does not merge with the text, or alone if all four merge.
    """
    for before in ("\n", ".", "a", "1"):
        first, cut = text_tokens(tokenizer, before), text_tokens(tokenizer, before + text, controls=controls)
        if cut[: len(first)] == first:
            return cut[len(first) :]
    return text_tokens(tokenizer, text, controls=controls)


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in messages or tools, without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def _turn_begins(marked: _Marked, tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
    """Return the role of each turn and the character of ``text`` at which it begins, ascending."""
    stem = marked.stem
    located = [_located(message, f"{stem}{number}:", f"{stem}:") for number, message in enumerate(marked.messages)]
    places = re.compile(rf"{stem}(\d*):")
    opened = marked.rendered(tokenizer, located, opened=True) + marked.opening
    if places.sub("", opened) != text:
        return []
    spans, end, removed = list[tuple[int, int, str]](), 0, 0  # end of the content before, begin of a content, role
    for match in places.finditer(opened):
        at = match.start() - removed
        removed += len(match.group())
        if match.group(1):
            spans.append((end, at, str(marked.messages[int(match.group(1))]["role"])))
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
    """Return a message with marks around its content or, without content, the name of the first tool that it calls."""
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
    """Return the place in ``gap``, the text between two messages, at which the header of the second message begins.

    The first message's turn ends with ``closing``, the text that closes the whole conversation, or, if the gap lacks
    it, with the first control token. White space after that belongs to the turn.
    """
    closed = gap.find(closing)
    if closed >= 0:
        return _after(gap, closed + len(closing))
    control = controls.search(gap)
    return len(gap) if control is None else _after(gap, control.end())


def _after(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _common(whole: Sequence[int], beginning: Sequence[int]) -> int:
    pairs = enumerate(zip(whole, beginning, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(whole), len(beginning)))


_CLOSE_ENOUGH = 0.99  # of the bound: the search stops there


@dataclass(frozen=True)
class PromptText:
    """A prompt as text: a question or instruction, and an opening with which its answer begins.

    ``plain_opening`` is the opening in a plain prompt, ``chat_opening`` the one in a chat. A chat begins with the
    system message ``system``, unless that is None or the chat template refuses it.
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
        """Return ``document`` with the control tokens in this prompt's text and, if it is a chat, with its turns."""
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

    The prompt is returned with its token ids. ``compose`` makes the prompt with a given number of parts, from ``least``
    to ``most``; more parts make a longer prompt. The search stops at a prompt that fills 99% of ``tokens``.
    """

    def measured(parts: int) -> tuple[PromptText, tuple[int, ...]]:
        prompt = compose(parts)
        return prompt, prompt.tokens(tokenizer, chat=chat)

    fits, longest = least, measured(least)
    if (used := len(longest[1])) > tokens:
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
            fits, longest, used = guess, tried, len(tried[1])
    return longest
