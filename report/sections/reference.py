"""The page's symbols, and how to reproduce it: versions, hashes, and a study file made from the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from shlex import quote
from typing import Any

from kvdrift.report.printing.numbers import capital
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import FEW_CLUSTERS, ViewRow
from kvdrift.report.reading.facts import DEVELOPMENT, EVALUATION, Facts
from kvdrift.report.sections.section import Section
from kvdrift.schema.location import folder_name
from kvdrift.schema.study import FLOOR_ACTION, HTTP
from kvdrift.schema.study.design import stratum_of
from kvdrift.schema.windows import Windows

_OWN_COLUMNS = ("window", "kernel", "sinks")  # parameters of selectors that have their own columns
_NO_PARAMETERS = {"tova": ("window",)}  # for tova the window is always the last position
_PLANNED = ("replicates", "target_half_width", "alpha", "interval", "variance")


_ROWS = "row_multiple"  # an entry among the library versions of a unit


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


def definitions(content: PageContent) -> Section:
    """Make the section of the page's symbols."""
    lags = not content.facts.finite or content.windows.early_last >= 1
    branched = bool(content.residual_risks)
    values = {"lags": lags, "branched": branched, "few": FEW_CLUSTERS}
    return Section("definitions", "Definitions", values=values)


def provenance(content: PageContent) -> Section:
    """Make the section on reproduction: the command, hashes, seed, versions and the store."""
    known, facts = content.provenance, content.facts
    made = facts.study_sha256 is not None  # false if another generator made the events
    what = [
        f"study {facts.study_sha256[:12]}" if facts.study_sha256 else "",
        f"plan {facts.plan.sha256[:12]}" if facts.plan else "",
        f"seed {facts.seed}" if facts.seed is not None else "",
        facts.other_law,
        "; ".join(facts.devices),
    ]
    line = ", ".join(part for part in what if part)
    line = f"{line}: the same file, seed and versions give the same events, and the same store the same page."
    store = known.store or "STORE"
    file = f"{folder_name(facts.study)}.toml"
    rows = [
        ("Study file SHA-256", facts.study_sha256),
        ("Plan SHA-256", facts.plan.sha256 if facts.plan else ""),
        ("Generated with", _versions({name: facts.libraries[name] for name in facts.libraries if name != _ROWS})),
        ("Batches", _batches(facts.libraries.get(_ROWS, ""))),
        ("Analyzed and drawn with", _versions(known.libraries)),
        ("Store", known.store),
        ("Table versions", _versions(known.tables)),
    ]
    values = {
        "line": capital(line),
        "command": f"kvdrift run {quote(file)} --store {quote(store)}" if made else f"kvdrift report {quote(store)}",
        "file": file,
        "text": study_text(facts),
        "rows": [row for row in rows if row[1]],
    }
    return Section("provenance", "To reproduce", values=values)


def _versions(versions: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _batches(multiple: str) -> str:
    """Say to how many rows decoding pads its batches at most; several numbers if unlike machines made units."""
    numbers = [number for number in multiple.split(", ") if number not in {"", "1"}]
    if not numbers:
        return ""
    return (
        f"padded to a multiple of {' or of '.join(numbers)} rows, or of fewer if a test of this model and machine "
        "found these to be enough, so that batch size cannot change results"
    )
