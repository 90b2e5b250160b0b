"""Prompts from a JSON Lines file: id, prompt or messages, and optionally stratum, cluster, split, answers, scoring."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvdrift.generator.documents.answers import score_text
from kvdrift.generator.documents.files import SourceRow, find_file, read_rows
from kvdrift.generator.documents.prompts import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Conversation,
    PromptText,
    TemplateRefusalError,
    Tokenizer,
)
from kvdrift.generator.documents.source import Candidate, DocumentSource, document_of, documents_of_rows
from kvdrift.schema.document import SCORINGS, SPLITS, Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection

JSONL = "jsonl"
TASK = "prompt"
_NAMED = 5  # strata in a line
_ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
_ANSWERED = (USER, TOOL)


class JsonlSource(DocumentSource):
    """The rows of ``path`` in the file's order, with prompts of at most ``length`` tokens.

    A row has a ``prompt``, or ``messages``, a conversation whose last message the model answers, with the ``tools``
    that it may call. The model's chat template writes conversations, which are never shortened.

    A row with a ``stratum`` belongs to that stratum only; a row without one fits every stratum that names the file, but
    a study takes no document twice: ``part`` divides the rows among such strata. Rows of strata that a study does not
    name are left out, and a line reports it. Rows with the same ``cluster`` are in one split, which any of these rows
    may name (``split``). A row's ``answers`` are scored by their share that occurs in a continuation (``scoring``
    "all", the default), or by whether any does ("part", or "normalized" without punctuation, articles and further white
    space).
    """

    takes = ("path", "chat_template")
    needs = ("path",)
    summary = (
        "path: a JSON Lines file of id, prompt or messages (with tools), and optionally stratum, cluster, split, "
        "answers, scoring; no tasks"
    )

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:  # noqa: ARG002 - one task
        """Yield the stratum's rows as candidates; refuse a second row with the same ``id``."""
        first: dict[str, str] = {}
        for number, row in read_rows(_file(section)):
            if row.has("stratum") and _name(row, "stratum") != section.stratum_name:
                continue
            name = _name(row, "id")
            if name in first:
                raise row.error(f"field 'id': '{name}' is also the id of {first[name]}")
            first[name] = row.place
            _ = _prompt(row, section)
            yield Candidate(name, cluster_of(row), TASK, number)

    def documents(
        self, section: DocumentsSection, chosen: Sequence[Candidate], tokenizer: Tokenizer, _seed: int
    ) -> list[Document]:
        """Tokenize the prompts of the chosen rows; the seed is not used."""

        def make(item: Candidate, row: SourceRow) -> Document:
            field, prompt = _field(row), _prompt(row, section)
            try:
                tokens = prompt.tokens(tokenizer)
            except TemplateRefusalError as error:
                raise row.error(f"field '{field}': {error}") from None
            if len(tokens) > section.length:
                raise row.error(
                    f"field '{field}': {len(tokens)} tokens, above the stratum's length = {section.length}; shorten "
                    "the prompt or raise length"
                )
            scoring = _scoring(row)
            answers = _answers(row, scoring)
            document = document_of(section, item, tokens, answers, scoring if answers else None)
            return prompt.described(document, tokenizer)

        return documents_of_rows(chosen, lambda _: _file(section), make)


def has_chats(section: DocumentsSection) -> bool:
    """Return whether any row of a section's file has ``messages``; False if the file is not on this machine."""
    try:
        file = _file(section)
    except InputError:
        return False
    return any(row.has("messages") for _, row in read_rows(file))


def missed(section: DocumentsSection) -> str:
    """Return how many rows a section's file has for it or, if all name other strata, which; for an error line."""
    file = _file(section)
    of_row = [row.text("stratum") if row.has("stratum") else section.stratum_name for _, row in read_rows(file)]
    rows_of_stratum = of_row.count(section.stratum_name)
    if rows_of_stratum or not of_row:
        return f"; {file} has {rows_of_stratum} row(s) for it"
    named = sorted(set(of_row))
    listed = ", ".join(f"'{name}'" for name in named[:_NAMED])
    return f'; the rows of {file} are of {listed}: write stratum = "{named[0]}", or remove stratum from the rows'


def left_out(sections: Sequence[DocumentsSection]) -> list[str]:
    """Return a line for each file with rows of strata that no section of a study has: how many, of which strata."""
    strata: dict[Path, set[str]] = {}
    for section in sections:
        if section.source == JSONL:
            strata.setdefault(_file(section), set()).add(section.stratum_name)
    lines = []
    for file, taken in strata.items():
        rows = [row.text("stratum") if row.has("stratum") else None for _, row in read_rows(file)]
        others = Counter(name for name in rows if name is not None and name not in taken)
        if others:
            listed = [f"'{name}' ({count})" for name, count in others.most_common()]
            more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
            count = others.total()
            lines.append(
                f"{file}: {count} of {len(rows)} rows {'is' if count == 1 else 'are'} left out, of strata that no "
                f"[[documents]] section of the file has: {', '.join(listed[:_NAMED])}{more}"
            )
    return lines


def named_splits(sections: Sequence[DocumentsSection]) -> dict[str, str]:
    """Return the split of each cluster for which a row of the files of a study's sections names a split."""
    return cluster_splits(_file(section) for section in sections if section.source == JSONL)


def cluster_splits(files: Iterable[Path]) -> dict[str, str]:
    """Return the split of each cluster for which rows name a split; rows of one cluster must name the same split."""
    named: dict[str, tuple[str, SourceRow]] = {}
    for file in dict.fromkeys(files):
        for row in (row for _, row in read_rows(file) if row.has("split")):
            if (split := row.text("split")) not in SPLITS:
                raise row.error(f"field 'split': '{split}' must be {' or '.join(SPLITS)}")
            cluster = cluster_of(row)
            other, first = named.setdefault(cluster, (split, row))
            if split != other:
                raise row.error(
                    f"field 'split': '{split}', but {first.place} of {first.file}, of the same cluster '{cluster}', "
                    f"has '{other}'; a cluster is in one split"
                )
    return {cluster: split for cluster, (split, _) in named.items()}


def cluster_of(row: SourceRow) -> str:
    """Return the row's cluster; a row without one is a cluster of its own."""
    return _name(row, "cluster" if row.has("cluster") else "id")


def _field(row: SourceRow) -> str:
    """Return the name of the field that has the row's prompt."""
    return "messages" if row.has("messages") else "prompt"


def _prompt(row: SourceRow, section: DocumentsSection) -> PromptText | Conversation:
    if _field(row) == "messages":
        if row.has("prompt"):
            raise row.error("fields 'prompt' and 'messages': a row has one of the two")
        if section.chat_template is False:
            raise row.error(
                "field 'messages': needs the chat template, and the study file has chat_template = false; leave that "
                "key out"
            )
        return _conversation(row)
    if row.has("tools"):
        raise row.error("field 'tools': belongs to 'messages'; a prompt is text alone")
    if not (text := row.text("prompt")):
        raise row.error("field 'prompt': the text is empty")
    return Conversation([{"role": USER, "content": text}]) if section.chat_template else PromptText(text)


def _name(row: SourceRow, field: str) -> str:
    """Return the field's text; refuse an empty text."""
    if not (text := row.text(field)):
        raise row.error(f"field '{field}': the text is empty{'' if field == 'id' else '; leave it out'}")
    return text


def _answers(row: SourceRow, scoring: str | None) -> tuple[str, ...]:
    answers = row.texts("answers") if row.has("answers") else ()
    for answer in answers:
        if not answer.strip() or (scoring and score_text("", [answer], scoring)):
            problem = "an answer is empty" if not answer.strip() else f"'{answer}' is empty once normalized"
            raise row.error(f"field 'answers': {problem}, so every continuation contains it; leave it out")
    return answers


def _scoring(row: SourceRow) -> str | None:
    if not row.has("scoring"):
        return None
    if (named := row.text("scoring")) not in SCORINGS:
        raise row.error(f"field 'scoring': '{named}' must be {', '.join(SCORINGS[:-1])} or {SCORINGS[-1]}")
    return named


def _file(section: DocumentsSection) -> Path:
    return find_file([Path(section.path or "").expanduser()], "JSON Lines with id and prompt or messages")


def _conversation(row: SourceRow) -> Conversation:
    """Return the row's conversation; an error names the message and its field.

    Fields that are null are left out; fields that are not checked here reach the template unchanged.
    """
    messages = row.rows("messages")
    if not messages:
        raise row.error("field 'messages': the list is empty")
    for message in messages:
        _check_message(message)
    if (last := messages[-1].text("role")) not in _ANSWERED:
        raise messages[-1].error(
            f"field 'role': '{last}' must be {' or '.join(_ANSWERED)} in the last message, which the model answers; "
            f"leave the message out{', or give its text as answers' if last == ASSISTANT else ''}"
        )
    for name in ("messages", "tools"):
        row.encodable(name, json.dumps(row.fields.get(name), ensure_ascii=False))
    tools = [tool.fields for tool in row.rows("tools")] if row.has("tools") else None
    stated = [{name: value for name, value in message.fields.items() if value is not None} for message in messages]
    return Conversation(stated, tools)


def _check_message(message: SourceRow) -> None:
    if (role := message.text("role")) not in _ROLES:
        raise message.error(f"field 'role': '{role}' must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    calls = role == ASSISTANT and message.has("tool_calls")
    if calls:
        message.rows("tool_calls")
    if not calls or message.has("content"):
        message.text("content")
