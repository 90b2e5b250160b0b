"""``[[documents]]``: the prompts of one stratum."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvdrift.schema.study.section import MOST_TOKENS, PART, Documents, Name, Section, meaning


class DocumentsSection(Section):
    """``[[documents]]``: one stratum.

    ``kvdrift.generator.documents.registry.check_source`` checks which optional keys a source takes or needs. In a
    section read from a file, ``path`` and ``exclude`` are absolute paths.
    """

    source: str = meaning(
        'The source of the prompts: "embedded", "ruler", "helmet" or "jsonl"; "finite-state" for finite-state systems.',
        example="embedded",
    )
    tasks: list[str] = meaning("Tasks of the source; documents take them in turn.", example=["needle"], default=[])
    length: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = meaning(
        "The most tokens that a prompt has.", "tokens", example=768, needed=True, default=0
    )
    development: Documents = meaning(
        "The number of development documents, from which the plan is made. They are not part of the evaluation.",
        "documents",
        example=3,
    )
    evaluation: Documents = meaning(
        "The number of evaluation documents; the plan may take fewer. All documents of a study are made "
        "before the first is measured, so a study has at most 100,000.",
        "documents",
        example=10,
    )
    stratum: Name | None = meaning(
        "The stratum's name; by default source and length, as in `EMBEDDED-768`, or the source alone. Rows "
        "of a JSON Lines file that name another stratum are left out; a run says how many rows no section "
        "takes. A row without a stratum fits every section of its file. A study must not take a row twice; "
        "`part` divides such rows among sections.",
        default=None,
    )
    path: str | None = meaning("The file or folder from which the source reads.", default=None)
    exclude: str | None = meaning(
        "A JSON file with a list `clusters`; documents of these clusters are left out. "
        "`kvdrift confirm` writes such files.",
        default=None,
    )
    part: Annotated[str, Field(pattern=PART)] = meaning(
        'The part of the source\'s clusters to take. Studies or strata of parts "1/2" and "2/2" share no document.',
        default="1/1",
    )
    shots: Annotated[int, Field(ge=0, le=1000)] | None = meaning(
        "The number of worked examples in front of a prompt; 2 by default.", "examples", default=None
    )
    chat_template: bool | None = meaning(
        "Whether a prompt is written as a chat with the template of the model's tokenizer. Rows of a JSON Lines file "
        "that have `messages` are written so in any case.",
        default=None,
    )

    @property
    def stratum_name(self) -> str:
        """The stratum's name; by default source and length, as in RULER-768."""
        return stratum_of(self.stratum, self.source, self.length)

    @property
    def part_of_clusters(self) -> tuple[int, int]:
        """``part`` as (number of the part, number of parts); different parts of a source share no cluster."""
        which, parts = self.part.split("/")
        return int(which), int(parts)


def stratum_of(stratum: str | None, source: str, length: int) -> str:
    """Return a section's stratum: the name that the section gives, else source and length, or the source alone."""
    return stratum or (f"{source.upper()}-{length}" if length else source)
