"""Revisions of actions, plans and documents: which revision is current, and what it supersedes.

A row of ``actions`` with a higher revision supersedes the units of all lower revisions, in every model of the study. A
row with ``dropped`` has no units. Superseded units stay in the log but not in the views. The row of ``plans`` with the
highest revision is the plan of its study and model. The row of ``documents`` with the highest revision determines a
document's answers, scoring and cluster. Scores made with earlier answers are superseded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_DOCUMENT = ("study", "model", "doc")


def newest_revisions(actions: pa.Table) -> dict[tuple[str, str], int]:
    """Return the highest revision of each action by (study, action), including dropped actions."""
    newest: dict[tuple[str, str], int] = {}
    for row in actions.select(["study", "action", "action_revision"]).to_pylist():
        named = (row["study"], row["action"])
        newest[named] = max(newest.get(named, 0), row["action_revision"])
    return newest


def current_actions(actions: pa.Table, study: str) -> dict[str, dict[str, Any]]:
    """Return the current row of each action of a study that is not dropped, by the action's name."""
    rows = sorted(actions.to_pylist(), key=lambda row: row["action_revision"])
    newest = {row["action"]: row for row in rows if row["study"] == study}
    return {name: row for name, row in newest.items() if not row["dropped"]}


def current_units(units: pa.Table, actions: pa.Table) -> pa.Table:
    """Return the rows of ``units`` of current revisions; an action without a row in ``actions`` has revision 0."""
    if not _are_revised(actions):
        return units
    names = zip(*(units[name].to_pylist() for name in ("study", "action", "action_revision")), strict=True)
    return units.filter(pa.array(map(current_revision(actions), names), pa.bool_()))


def current_revision(actions: pa.Table) -> Callable[[tuple[str, str, int]], bool]:
    """Return a function that tells whether a (study, action, revision) is the newest of its action and not dropped."""
    if not _are_revised(actions):
        return lambda _: True
    newest = newest_revisions(actions)
    dropped = {(row["study"], row["action"], row["action_revision"]) for row in actions.to_pylist() if row["dropped"]}
    return lambda named: named[2] == newest.get(named[:2], 0) and named not in dropped


def _are_revised(actions: pa.Table) -> bool:
    return bool(pc.any(pc.or_(pc.greater(actions["action_revision"], 0), actions["dropped"])).as_py())


def newest_plans(plans: pa.Table) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the row of the newest revision of each plan, by (study, model)."""
    rows = sorted(plans.to_pylist(), key=lambda row: row["plan_revision"])
    return {(row["study"], row["model"]): row for row in rows}


def are_revised(documents: pa.Table) -> bool:
    """Tell whether any document has a revision above 0."""
    return bool(pc.any(pc.greater(documents["document_revision"], 0)).as_py())


def current_documents(documents: pa.Table) -> pa.Table:
    """Return the row of the newest revision of each document, in the order of the rows."""
    if not are_revised(documents):
        return documents
    newest = documents.group_by(list(_DOCUMENT)).aggregate([("document_revision", "max")])
    newest = newest.rename_columns([*_DOCUMENT, "document_revision"])
    return _of_revisions(documents, newest)


def current_scores(scores: pa.Table, documents: pa.Table) -> pa.Table:
    """Return the scores made with the newest answers of their documents; ``documents`` are all rows of that table."""
    return _of_revisions(scores, current_documents(documents)) if are_revised(documents) else scores


def _of_revisions(rows: pa.Table, documents: pa.Table) -> pa.Table:
    """Return the rows whose document and document revision occur together in ``documents``."""
    key = [*_DOCUMENT, "document_revision"]
    known = set(zip(*(documents[name].to_pylist() for name in key), strict=True))
    named = zip(*(rows[name].to_pylist() for name in key), strict=True)
    return rows.filter(pa.array([revision in known for revision in named], pa.bool_()))
