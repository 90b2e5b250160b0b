"""The SQL text of every view: views in files, and views of stored tables, which leave out superseded rows."""

from __future__ import annotations

import functools
import graphlib
import re
from collections.abc import Mapping
from typing import Final

from kvdrift.schema.tables import TABLES
from kvdrift.sql.contracts import contract, stored_tables, view_files
from kvdrift.sql.quoting import quoted

_READS: Final = re.compile(r"\b(?:main|internal)\.\w+")


def view_texts() -> Mapping[str, str]:
    """Return the SQL text of every view's file by view name, each view after the views that it reads."""
    return {name.partition(".")[2]: text for name, text in qualified_texts().items()}


@functools.cache
def qualified_texts() -> Mapping[str, str]:
    """The SQL text of every view by schema and name, each after the views that it reads."""
    texts = {_qualified(table): stored_text(table) for table in stored_tables()}
    texts |= {_qualified(name): text for name, text in view_files(".sql").items()}
    reads = {name: set(_READS.findall(text)) & texts.keys() for name, text in texts.items()}
    return {name: texts[name] for name in graphlib.TopologicalSorter(reads).static_order()}


def _qualified(view: str) -> str:
    return f"{contract(view).schema}.{view}"


def stored_text(table: str) -> str:
    """Return the SQL text of a stored table's view: its declared columns, without the rows of superseded revisions.

    Table ``plans`` keeps all revisions. Rows made under a plan are shown only if the plan is the newest. Documents, and
    rows scored or estimated from documents, are shown only in the newest revision.
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
