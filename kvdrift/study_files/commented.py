"""A new study file, with a comment to each key from the schema's own words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdrift.schema.study import KERNEL_FLOOR_ACTION
from kvdrift.schema.study.sweeps import of_each_member
from kvdrift.study_files.keys import Heading, headings, toml

_WIDTH = 100
_FEWEST = 12  # evaluation documents of a stratum, if there are that many
Table = dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """The values that a new study file sets; other keys have their defaults."""

    study: Table  # Values of ``[study]``
    model: Table  # Values of ``[model]``
    documents: Sequence[Table]  # Values of each stratum
    actions: Sequence[Table]  # Values of each action; the first is the baseline
    remarks: dict[str, str] = field(default_factory=dict)  # Comments at the heads of sections, by the section's name

    @property
    def plan(self) -> Table:
        """Return the values of ``[plan]``: a small study whose size the development documents decide.

        If there are few documents, all are measured, whatever half-width fewer would give.
        """
        names = [action["name"] for action in of_each_member({"actions": [*self.actions]})["actions"]]
        compared = [name for name in names if name != KERNEL_FLOOR_ACTION]
        return {
            "baseline": names[0],
            "primary": ["gap", "exposure_term"] if len(compared) > 1 else ["mismatch"],
            "replicates": 16,
            "documents": "auto",
            "documents_at_least": min(_FEWEST, *(stratum["evaluation"] for stratum in self.documents)),
            "development_replicates": 16,
            "target_half_width": 0.06,
            "alpha": 0.05,
        }


def commented_study(draft: Draft, file_name: str) -> str:
    """Return a study file's text, with each key explained where the key first appears.

    The commands in its head name the file.
    """
    known = headings()
    tables: dict[str, Sequence[Table]] = {
        "study": [draft.study], "model": [draft.model], "documents": draft.documents, "actions": draft.actions,
        "plan": [draft.plan],
    }  # fmt: skip
    head = [
        "Written by kvdrift init. The first command forecasts work, time and memory; the second runs the study:",
        f"  kvdrift run {file_name} --dry-run",
        f"  kvdrift run {file_name}",
        "docs/study-file.md has all keys. Paths begin at this file's folder.",
    ]
    parts = ["".join(f"# {line}\n" for line in head)]
    for name, several in tables.items():
        parts += _section(known[name], several, draft.remarks.get(name))
    return "\n".join(parts)


def _section(heading: Heading, tables: Iterable[Table], remark: str | None) -> list[str]:
    explained: set[str] = set()
    parts = []
    for number, table in enumerate(tables):
        said = " ".join([heading.meaning, *([remark] if remark else [])]) if not number else ""
        lines = [*_comment(said), heading.title]
        for name, value in table.items():
            key = heading.keys.get(name)
            if key is not None and name not in explained:
                unit = f" Unit: {key.unit}." if key.unit and key.unit not in key.meaning else ""
                lines += ["", *_comment(key.meaning + unit)] if explained else _comment(key.meaning + unit)
                explained.add(name)
            lines.append(f"{name} = {toml(value)}")
        parts.append("\n".join(lines) + "\n")
    return parts


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text.replace("`", ""), _WIDTH - 2)]
