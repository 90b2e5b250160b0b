"""The SQL text of every view: of the files, of stored tables, and of moments that are stored or computed.

The moments of documents are views over steps, which are large. A store may have rows of them that were computed once
(``sql.materialized``); then each of these views has the stored rows and, for documents that wait for theirs, what its
file computes. So the texts of the files stand a second time in the schema ``computed``, over waiting documents.
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
"""The documents and actions (study, model, doc, action) whose stored moments, if any, are not the present ones."""

MATERIALIZED: Final = ("moments", "position_moments", "lag_moments", "depth_moments")
"""The views that have stored rows where the store keeps moments."""

READ_BY_COMPUTED: Final = {"steps": GROUP_KEY, "analyzed_trajectories": GROUP_KEY, "windows": ("study", "model")}
"""What the schema ``computed`` has of views that are computed from, with their columns of names."""

_KEYS = f"using ({', '.join(GROUP_KEY)})"
_READS = re.compile(r"\b(?:main|internal|computed)\.\w+")


def view_texts() -> Mapping[str, str]:
    """The SQL text of every view by name, each after the views that it reads, as the files have them."""
    return {name.partition(".")[2]: text for name, text in qualified_texts().items()}


@functools.cache
def qualified_texts(*, stored: bool = False, waiting: bool = False) -> Mapping[str, str]:
    """The SQL text of every view by schema and name, each after the views that it reads.

    Args:
        stored: Whether the views of moments have stored rows; otherwise they are the texts of their files.
        waiting: Whether they also have computed rows, of the documents in ``WAITING``.

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
    """The views of moments over waiting documents, and what they read, by schema and name."""
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
    """What stored moments are computed by: a SHA-256 of the texts of their views and of all that these read.

    The schema that a view is in changes nothing that is computed: all count as those of ``main``.
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
    """The text of a file of ``sql/materialized``."""
    return (resources.files("sql") / "materialized" / f"{name}.sql").read_text("utf-8")


def _qualified(view: str) -> str:
    return f"{contract(view).schema}.{view}"


def _of_main(text: str) -> str:
    return re.sub(r"\binternal\.", "main.", text)


def stored_text(table: str) -> str:
    """The view of a stored table: its declared columns as they are, without the rows of superseded revisions.

    Of plans it has all revisions, of what was made under plans only what was made under the newest. Of documents, and
    of what was scored or estimated from them, it has the newest revision.

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
