"""The keys of a study file with the schema's descriptions, and new files with a comment to each key."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdrift.schema.study import KERNEL_FLOOR_ACTION, Study
from kvdrift.schema.study.reading import of_each_member, toml

_WIDTH = 100
_FEWEST = 12  # the least N that a plan may choose, unless a stratum has fewer evaluation documents
_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "table"}
_LARGEST = 1 << 63
_HEAD = """\
# Written by kvdrift init. The first command forecasts work, time and memory; the second runs the study:
#   kvdrift run {file} --dry-run
#   kvdrift run {file}
# All keys: kvdrift list keys. Paths begin at this file's folder.
"""
Table = dict[str, Any]


@dataclass(frozen=True)
class Heading:
    """A section of a study file."""

    title: str  # The line that begins the section: ``[plan]``, or ``[[actions]]`` of which there may be several
    meaning: str  # The meaning of the section
    keys: dict[str, Table]  # The JSON schema of each key, and under ``needed`` whether a transformer needs the key


def headings() -> dict[str, Heading]:
    """Return the sections of a study file, by name, in the file's order."""
    schema = Study.model_json_schema()
    sections = {}
    for name, property_schema in schema["properties"].items():
        listed = "items" in property_schema
        section = schema["$defs"][(property_schema["items"] if listed else property_schema)["$ref"].rpartition("/")[2]]
        keys = {
            key: {"needed": key in section.get("required", ()), **values}
            for key, values in section["properties"].items()
        }
        sections[name] = Heading(f"[[{name}]]" if listed else f"[{name}]", property_schema["description"], keys)
    return sections


def kind(schema: Mapping[str, Any]) -> str:
    """Return the values that a key takes, in words."""
    if "anyOf" in schema:
        return " or ".join(
            dict.fromkeys(kind(alternative) for alternative in schema["anyOf"] if alternative.get("type") != "null")
        )
    if "enum" in schema or "const" in schema:
        return " or ".join(map(toml, schema.get("enum", [schema.get("const")])))
    if "prefixItems" in schema:
        return f"[{', '.join(map(kind, schema['prefixItems']))}]"
    if schema["type"] == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {kind(schema['items']).replace(' or ', 's or ')}s{most}"
    named = f", at most {schema['maxLength']} letters, digits, . _ -" if "maxLength" in schema else ""
    return _KINDS[schema["type"]] + named + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    low, above, below = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "exclusiveMaximum"))
    if above is not None:
        most = f", at most {schema['maximum']}" if "maximum" in schema else ""
        return f" above {above}{most}" if below is None else f" between {above} and {below}"
    if below == _LARGEST:
        return f", {low} to 2^63 - 1"
    if below is not None and schema["type"] == "number":
        return f", {low} or more and below {below}"
    if "maximum" in schema:
        return f", {low} to {schema['maximum']:,}"
    return "" if low is None else f", {low} or more"


def commented_study(
    study: Table, model: Table, documents: Sequence[Table], actions: Sequence[Table], remark: str, file_name: str
) -> str:
    """Return a study file's text, with each key explained where the key first appears; other keys have their defaults.

    The values are those of ``[study]`` and ``[model]``, of each stratum and of each action, of which the first is the
    baseline. ``remark`` is a comment at the head of the strata. The commands in the comment at the text's beginning run
    ``file_name``.
    """
    known, parts = headings(), [_HEAD.format(file=file_name)]
    sections = {
        "study": [study], "model": [model], "documents": documents, "actions": actions,
        "plan": [_plan(documents, actions)],
    }  # fmt: skip
    for name, tables in sections.items():
        parts += _section(known[name], tables, remark if name == "documents" else "")
    return "\n".join(parts)


def _plan(documents: Sequence[Table], actions: Sequence[Table]) -> Table:
    """Return the values of ``[plan]``: a small study whose size the development documents decide.

    N is at least ``_FEWEST``, or the size of a smaller stratum, even if fewer documents would reach the half-width.
    """
    names = [action["name"] for action in of_each_member({"actions": [*actions]})["actions"]]
    compared = [name for name in names if name != KERNEL_FLOOR_ACTION]
    return {
        "baseline": names[0],
        "primary": ["gap", "exposure_term"] if len(compared) > 1 else ["mismatch"],
        "replicates": 16,
        "documents": "auto",
        "documents_at_least": min(_FEWEST, *(stratum["evaluation"] for stratum in documents)),
        "development_replicates": 16,
        "target_half_width": 0.06,
        "alpha": 0.05,
    }


def _section(heading: Heading, tables: Sequence[Table], remark: str) -> list[str]:
    explained, parts = set[str](), []
    for number, table in enumerate(tables):
        lines = [*([] if number else _comment(f"{heading.meaning} {remark}")), heading.title]
        for name, value in table.items():
            if name in heading.keys and name not in explained:
                key = heading.keys[name]
                unit = f" Unit: {key['unit']}." if key.get("unit", "") not in key["description"] else ""
                lines += [*([""] if explained else []), *_comment(key["description"] + unit)]
                explained.add(name)
            lines.append(f"{name} = {toml(value)}")
        parts.append("\n".join(lines) + "\n")
    return parts


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text.replace("`", ""), _WIDTH - 2)]
