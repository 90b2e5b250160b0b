"""A study file that reproduces the events of a stored study, shown on the page since stores keep no study file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from kvdrift.report.reading.facts import DEVELOPMENT, EVALUATION, Facts
from kvdrift.report.reading.source import ViewRow
from kvdrift.schema.study import FLOOR_ACTION, HTTP
from kvdrift.schema.study.documents import stratum_of
from kvdrift.schema.windows import Windows

_OWN_COLUMNS = ("window", "kernel", "sinks")  # parameters of selectors that have their own columns
_NO_PARAMETERS = {"tova": ("window",)}  # for tova the window is always the last position
_PLANNED = ("replicates", "target_half_width", "alpha", "interval", "variance")


def study_text(facts: Facts) -> str | None:
    """Return a study file made from the store; None for finite-state systems and for another generator's events.

    The file decides the same events: ``study_sha256`` is the same. ``[plan]`` has the chosen K and N.
    """
    if facts.settings is None or facts.finite:
        return None
    content = json.loads(facts.settings)
    tables = [("[study]", content["study"]), ("[model]", content["model"])]
    for section in content["documents"]:
        stratum = stratum_of(section["stratum"], section["source"], section["length"])
        own = {split: facts.listed.get((stratum, split), 0) for split in (DEVELOPMENT, EVALUATION)}
        tables.append(("[[documents]]", section | own))
    tables += [("[[actions]]", _action(row)) for row in facts.actions if not row["control"] and not _is_floor(row)]
    if facts.plan is not None:
        tables.append(("[plan]", _plan(facts.plan.content)))
    windows = asdict(facts.windows)
    if (horizon := windows.pop("horizon")) and facts.windows != Windows.of(horizon):
        tables.append(("[windows]", windows))
    head = "# Written from the store, which keeps what a study file says and not the file.\n"
    if any(not section.get("tasks") for section in content["documents"]):
        head += "# Stores keep no paths either: give documents that were read from a file their path.\n"
    if content["model"].get("engine") == HTTP:
        head += "# Stores keep no addresses of servers: give [model] and each action a url.\n"
    return "\n".join([head, *(_table(title, values) for title, values in tables)])


def _is_floor(row: ViewRow) -> bool:
    """Tell whether an action is an engine's repeat of the reference, which every study of an engine has by itself."""
    return row["settings"] is not None and row["action"] == FLOOR_ACTION


def _action(row: ViewRow) -> dict[str, Any]:
    weights = {} if row["weights"] is None else {"weights": row["weights"]}
    if row["settings"] is not None:
        settings = json.loads(row["settings"])
        said = {"settings": settings} if settings or row["weights"] is None else {}
        return {"name": row["action"], **said, **weights}
    keep = int(row["keep"]) if str(row["keep"]).isdigit() else row["keep"]
    action: dict[str, Any] = {"name": row["action"], **weights, "keep": keep}
    if row["policy"]:
        return action | {"policy": _named(row["policy"], row["policy_parameters"])}
    columns = [name for name in _OWN_COLUMNS if row[name] and name not in _NO_PARAMETERS.get(row["selector"], ())]
    own: dict[str, Any] = {name: row[name] for name in columns} | json.loads(row["parameters"] or "{}")
    codec = {"codec": _named(row["codec"], row["codec_parameters"])} if row["codec"] else {}
    return action | {"selector": row["selector"]} | own | codec


def _named(name: str, parameters: str | None) -> str | dict[str, Any]:
    return {"name": name, **json.loads(parameters)} if parameters else name


def _plan(content: dict[str, Any]) -> dict[str, Any]:
    primary = list(dict.fromkeys(row["quantity"] for row in content["primary_endpoints"]))
    development = content.get("development", {}).get("replicates")
    return {
        "baseline": content["baseline"], "primary": primary, "documents": content["documents_per_stratum"],
        "development_replicates": development, **{name: content.get(name) for name in _PLANNED},
    }  # fmt: skip


def _table(title: str, values: dict[str, Any]) -> str:
    lines = [f"{name} = {_value(value)}" for name, value in values.items() if value is not None]
    return "\n".join([title, *lines]) + "\n"


def _value(value: Any) -> str:
    """Write a value as TOML: JSON's scalars and lists, and tables on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(one)}" for name, one in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
