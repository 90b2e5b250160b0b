"""``[[documents]]``: the prompts of one stratum."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.study.section import MOST_TOKENS, PART, Documents, Name, Section, meaning


class DocumentsSection(Section):
    """``[[documents]]``: one stratum.

    Which of the optional keys a source takes or needs is checked by ``generator.documents.registry.check_source``. What
    is read from a file has absolute paths in ``path`` and ``exclude``.
    """

    source: Annotated[
        str,
        meaning(
            'Where prompts come from: "embedded", "ruler", "helmet" or "jsonl"; "finite-state" for such a model.',
            example="embedded",
        ),
    ]
    tasks: Annotated[list[str], meaning("Tasks of the source, which take turns.", example=["needle"])] = []  # noqa: RUF012 - pydantic copies it
    length: Annotated[
        int,
        Field(ge=0, le=MOST_TOKENS),
        meaning("How many tokens a prompt has at most.", "tokens", example=768, needed=True),
    ] = 0
    development: Annotated[
        Documents,
        meaning("Documents that the plan is made from, which are not measured again.", "documents", example=3),
    ]
    evaluation: Annotated[
        Documents,
        meaning(
            "Documents to measure, of which the plan may take fewer. All documents of a study are made before the "
            "first is measured, so that it has at most 100,000.",
            "documents",
            example=10,
        ),
    ]
    stratum: Annotated[
        Name | None,
        meaning(
            "The stratum's name; by default source and length, as in `EMBEDDED-768`, or the source alone. Rows of a "
            "JSON Lines file that name another stratum are not in it; a run says how many no section takes. A row that "
            "names none fits every section of its file, and a study takes no row twice: `part` tells them apart."
        ),
    ] = None
    path: Annotated[str | None, meaning("The file or folder that the source reads.")] = None
    exclude: Annotated[
        str | None, meaning("A JSON file whose `clusters` are left out; `kvdrift confirm` writes such files.")
    ] = None
    part: Annotated[
        str,
        Field(pattern=PART),
        meaning(
            'Which part of the source\'s clusters is taken: studies or strata of parts "1/2" and "2/2" share no '
            "document."
        ),
    ] = "1/1"
    shots: Annotated[
        Annotated[int, Field(ge=0, le=1000)] | None,
        meaning("Worked examples in front of a prompt; 2 by default.", "examples"),
    ] = None
    chat_template: Annotated[
        bool | None, meaning("Whether a prompt is written as a chat, by the template of the model's tokenizer.")
    ] = None

    @property
    def stratum_name(self) -> str:
        """The stratum's name; by default source and length, as in RULER-768."""
        return self.stratum or (f"{self.source.upper()}-{self.length}" if self.length else self.source)

    @property
    def part_of_clusters(self) -> tuple[int, int]:
        """``part`` as (which, of how many): studies that take different parts of a source share no cluster."""
        which, parts = self.part.split("/")
        return int(which), int(parts)
