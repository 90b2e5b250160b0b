"""The keys of a study file's sections, as the schema declares them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from kvdrift.schema.study import Study
from kvdrift.schema.study.section import Section

_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "table"}
_EXPONENT = 63


@dataclass(frozen=True)
class Key:
    """A key of a section."""

    name: str  # The key
    kind: str  # The values that the key takes, in words
    default: str | None  # The default as TOML; None without a default, or if omitting the key has a meaning of its own
    required: bool  # Whether a study of transformers needs it
    unit: str  # The unit of the value; empty without a unit
    meaning: str  # The meaning of the key, in sentences


@dataclass(frozen=True)
class Heading:
    """A section: ``[plan]``, or ``[[actions]]`` of which there may be several."""

    name: str  # The section's name
    title: str  # The line that begins the section in the file
    meaning: str  # The meaning of the section
    keys: dict[str, Key]  # Its keys, by name, in the schema's order


def headings() -> dict[str, Heading]:
    """Return the sections of a study file, by name, in the file's order."""
    found = {}
    for name, field in Study.model_fields.items():
        annotation: Any = field.annotation
        listed = get_args(annotation)
        section: type[Section] = listed[0] if listed else annotation
        title = f"[[{name}]]" if listed else f"[{name}]"
        found[name] = Heading(name, title, field.description or "", keys_of(section))
    return found


def keys_of(section: type[Section]) -> dict[str, Key]:
    """Return the keys of a section, by name."""
    schema = section.model_json_schema()
    required = set(schema.get("required", ()))
    return {name: _key(name, key, required=name in required) for name, key in schema["properties"].items()}


def toml(value: Any) -> str:
    """Write a plain value as TOML: texts, numbers, lists and truth values as in JSON, a table in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(one)}' for key, one in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str, schema: dict[str, Any], *, required: bool) -> Key:
    needed = required or bool(schema.get("needed"))
    default = None if needed or schema.get("default") is None else toml(schema["default"])
    return Key(name, _kind(schema), default, needed, schema.get("unit", ""), schema["description"])


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(toml, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        inner = schema.get("prefixItems")
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        if inner:
            return f"[{', '.join(map(_kind, inner))}]"
        return f"list of {_kind(schema['items']).replace(' or ', 's or ')}s{most}"
    named = f", at most {schema['maxLength']} letters, digits, . _ -" if "maxLength" in schema else ""
    return _KINDS[schema["type"]] + named + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    if "exclusiveMinimum" in schema:
        low, high = schema["exclusiveMinimum"], schema.get("exclusiveMaximum")
        most = f", at most {schema['maximum']}" if "maximum" in schema else ""
        return f" above {low}{most}" if high is None else f" between {low} and {high}"
    low = schema.get("minimum")
    if schema.get("exclusiveMaximum") == 1 << _EXPONENT:
        return f", {low} to 2^{_EXPONENT} - 1"
    if "maximum" in schema:
        return f", {low} to {schema['maximum']:,}"
    return "" if low is None else f", {low} or more"
