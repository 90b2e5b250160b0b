"""Prompts of one's own, from a JSON Lines file: ``id``, ``prompt``, perhaps ``stratum``, ``cluster``, ``answers``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from generator.documents.files import find_file, read_rows
from generator.documents.prompts import PromptText, Tokenizer
from generator.documents.source import Candidate, need_tokenizer
from schema.document import Document
from schema.errors import InputError
from schema.study import DocumentsSection

TASK = "prompt"


class JsonlSource:
    """The rows of ``path`` in the file's order; ``length`` is the most tokens that a prompt may have.

    A row with a ``stratum`` belongs to the stratum of that name alone, any other row to every stratum that names the
    file. Rows with the same ``cluster`` are dependent, and stay on one side of the split.
    """

    tasks: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("path", "chat_template")
    needs: tuple[str, ...] = ("path",)
    reads_text = True
    summary = "path: a JSON Lines file of id, prompt, and perhaps stratum, cluster, answers; no tasks"

    def makes(self, task: str) -> bool:  # noqa: ARG002 - none
        """No task."""
        return False

    def check(self, section: DocumentsSection) -> None:
        """Nothing beside the keys."""

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:  # noqa: ARG002 - one task
        """The stratum's rows; InputError where an ``id`` stands twice."""
        first: dict[str, str] = {}
        for number, row in read_rows(_file(section)):
            if row.has("stratum") and row.text("stratum") != section.stratum_name:
                continue
            name = row.text("id")
            if name in first:
                raise row.error(f"field 'id': '{name}' is that of {first[name]} too")
            first[name] = row.place
            if not row.text("prompt"):
                raise row.error("field 'prompt': is empty")
            yield Candidate(name, row.text("cluster") if row.has("cluster") else name, TASK, number)

    def documents(
        self,
        section: DocumentsSection,
        chosen: Sequence[Candidate],
        tokenizer: Tokenizer | None,
        seed: int,  # noqa: ARG002 - the file decides
    ) -> list[Document]:
        """The rows' prompts, tokenized; InputError for one above the stratum's length."""
        text_tokenizer = need_tokenizer(section, tokenizer)
        wanted = {item.place: item for item in chosen}
        made: dict[int, Document] = {}
        for number, row in read_rows(_file(section), wanted):
            tokens = PromptText(row.text("prompt")).tokens(text_tokenizer, chat=bool(section.chat_template))
            if len(tokens) > section.length:
                raise row.error(f"field 'prompt': {len(tokens)} tokens, above the stratum's length = {section.length}")
            item = wanted[number]
            made[number] = Document(
                doc=item.doc,
                stratum=section.stratum_name,
                cluster=item.cluster,
                task=TASK,
                source="jsonl",
                tokens=tokens,
                answers=row.texts("answers") if row.has("answers") else (),
            )
        if len(made) < len(wanted):
            raise InputError(f"{section.path}: changed while it was read")
        return [made[item.place] for item in chosen]


def _file(section: DocumentsSection) -> Path:
    return find_file([Path(section.path or "").expanduser()], "JSON Lines with id and prompt")
