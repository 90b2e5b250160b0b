"""Build the SQL text of every view: from its file, from a stored table, or from stored and computed moments.

The moments of documents are views over the large table ``steps``. A store may have moments that were computed once
(``sql.materialized``). Each view of moments then has the stored rows, and computes the rows of documents that wait for
theirs. For these documents the texts of the files stand a second time in the schema ``computed``.
"""

from __future__ import annotations

import functools
import graphlib
import hashlib
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Final

from schema.tables import GROUP_KEY, TABLES
from sql.contracts import contract, stored_tables, view_files
from sql.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

WAITING: Final = "computed.waiting"
"""The table of documents and actions (study, model, doc, action) that have no current stored moments."""

MATERIALIZED: Final = ("moments", "position_moments", "lag_moments", "depth_moments")
"""The views of moments: their rows are stored if the store keeps moments."""

READ_BY_COMPUTED: Final = {"steps": GROUP_KEY, "analyzed_trajectories": GROUP_KEY, "windows": ("study", "model")}
"""The views that computed moments read, copied into the schema ``computed``, with their columns of names."""

_KEYS = f"using ({', '.join(GROUP_KEY)})"
_READS = re.compile(r"\b(?:main|internal|computed)\.\w+")


def view_texts() -> Mapping[str, str]:
    """Return the SQL text of every view's file by view name, each view after the views that it reads."""
    return {name.partition(".")[2]: text for name, text in qualified_texts().items()}


@functools.cache
def qualified_texts(*, stored: bool = False, waiting: bool = False) -> Mapping[str, str]:
    """Return the SQL text of every view by schema and name, each view after the views that it reads.

    Args:
        stored: Whether the views of moments have stored rows; otherwise their texts are those of their files.
        waiting: Whether the views of moments also have computed rows, for the documents in ``WAITING``.

    """
    files = view_files(".sql")
    texts = {_qualified(table): stored_text(table) for table in stored_tables()}
    texts |= {_qualified(name): text for name, text in files.items()}
    if stored:
        texts |= {_qualified(name): materialized_text(name) for name in MATERIALIZED}
    if waiting:
        texts |= computed_texts()
        for name in MATERIALIZED:
            texts[_qualified(name)] += f"anti join {WAITING} {_KEYS}\nunion all by name from computed.{name}\n"
    reads = {name: set(_READS.findall(text)) & texts.keys() for name, text in texts.items()}
    return {name: texts[name] for name in graphlib.TopologicalSorter(reads).static_order()}


def computed_texts() -> Mapping[str, str]:
    """Return the texts of the views of moments over waiting documents and of the views they read, by qualified name."""
    files, own = view_files(".sql"), ("trajectory_moments", *MATERIALIZED)
    moved = re.compile(rf"\b(?:main|internal)\.({'|'.join((*own, *READ_BY_COMPUTED))})\b")
    texts = {
        name: f"from {_qualified(name)}" + (f" semi join {WAITING} {_KEYS}" if names == GROUP_KEY else "")
        for name, names in READ_BY_COMPUTED.items()
    }
    texts |= {name: moved.sub(r"computed.\1", files[name]) for name in own}
    return {f"computed.{name}": text for name, text in texts.items()}


@functools.cache
def moments_definition() -> str:
    """Return a SHA-256 of the texts of all views from which stored moments are computed.

    A view's schema does not change the result, so all views count as views of ``main``.
    """
    texts = qualified_texts(stored=True, waiting=True)
    found: dict[str, str] = {}
    todo = [f"computed.{name}" for name in MATERIALIZED]
    while todo:
        name = todo.pop()
        if name in texts and _of_main(name) not in found:
            found[_of_main(name)] = _of_main(texts[name])
            todo += _READS.findall(texts[name])
    return hashlib.sha256(json.dumps([sorted(found.items()), materialized_text("rows")]).encode()).hexdigest()


def materialized_text(name: str) -> str:
    """Return the text of a file of ``sql/materialized``."""
    return (resources.files("sql") / "materialized" / f"{name}.sql").read_text("utf-8")


def _qualified(view: str) -> str:
    return f"{contract(view).schema}.{view}"


def _of_main(text: str) -> str:
    return re.sub(r"\binternal\.", "main.", text)


def stored_text(table: str) -> str:
    """Return the SQL text of a stored table's view: its declared columns, without the rows of superseded revisions.

    Table ``plans`` keeps all revisions. Rows made under a plan are shown only if the plan is the newest. Documents, and
    rows scored or estimated from documents, are shown only in the newest revision.

    Args:
        table: The stored table.

    """
    declared = TABLES[table].columns
    columns = ",\n    ".join(f"own.{quoted(name)}" for name in declared)
    text = f"select\n    {columns}\nfrom stored.{quoted(table)} as own"
    for name, revision in (("action", "action_revision"), ("baseline", "baseline_revision")):
        if {"study", name, revision} <= set(declared):
            same = f"own.study = {name}s.study and own.{name} = {name}s.action"
            text += f"\nanti join internal.superseded as {name}s on {same} and own.{revision} = {name}s.action_revision"
    if "plan_sha256" in declared and "plan_revision" not in declared:
        same = " and ".join(f"own.{name} = plans.{name}" for name in ("study", "model", "plan_sha256"))
        text += f"\nanti join internal.superseded_plans as plans on {same}"
    if "document_revision" in declared:
        same = " and ".join(f"own.{name} = documents.{name}" for name in ("study", "model", "doc", "document_revision"))
        text += f"\nanti join internal.superseded_documents as documents on {same}"
    if "documents_revision" in declared:
        same = " and ".join(f"own.{name} = analyses.{name}" for name in ("study", "model", "documents_revision"))
        text += f"\nanti join internal.superseded_analyses as analyses on {same}"
    return text
