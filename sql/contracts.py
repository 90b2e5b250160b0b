"""Read the contract of each view: its grain, what its columns mean, which columns may be null, and its identities.

A view that computes rows has a contract in a TOML file beside its SQL, with these keys:

- ``keys``: columns that mean the same in every view (KEYS below).
- ``[columns]``: the view's own columns in order, with their meaning.
- ``moments``: a family of ``kvdrift.schema.moments`` whose columns follow the view's own; it declares their meaning,
  their unit and whether they may be null.
- ``[units]``: the columns of each unit; every column of numbers is listed.
- ``grain``: the unique key.
- ``nullable``: the columns that may be null.
- ``[identities]``: SQL predicates, with numerical tolerances, that hold on every row; the row is called ``view``.
- ``table``: in place of columns, the stored table whose rows the view selects.
- ``internal = true``: the view only serves other views; it is in the schema ``internal`` and not listed for users.
- ``costly = true``: all rows of a large store would take long, so users should ask for some rows.

The view of a stored table has no file: ``kvdrift.schema.tables`` declares its columns, their meaning and its grain.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.moments import (
    ANSWER_MOMENTS,
    LAG_MOMENTS,
    POSITION_MOMENTS,
    SCALAR_MOMENTS,
    AnswerMoment,
    Moment,
)
from kvdrift.schema.tables import DOCUMENTS, EVENTS, TABLES
from kvdrift.sql.quoting import literal, quoted

# Columns that mean the same in every view.
KEYS = {
    **{name: EVENTS.meanings[name] for name in ("study", "model", "doc", "action", "replicate")},
    **{name: DOCUMENTS.meanings[name] for name in ("split", "cluster")},
    "stratum": "stratum, or pooled: the mean of the strata with equal weight",
    "baseline": "the action that the contrast subtracts",
    "partner": "another action; the row pools only documents that both actions have",
}

# Stored tables whose rows users find in other views: the newest rows in estimates, plan and sequence, means in swrb.
INTERNAL_TABLES = ("branching_depths", "branchings", "identities", "looks", "plans", "results")

MOMENTS: Mapping[str, Mapping[str, Moment | AnswerMoment]] = {
    "scalar": SCALAR_MOMENTS,
    "position": POSITION_MOMENTS,
    "lag": LAG_MOMENTS,
    "answer": ANSWER_MOMENTS,
}


@dataclass(frozen=True)
class Contract:
    """The contract of one view; ``columns`` maps column names, in the view's order, to their meaning."""

    view: str
    description: str
    grain: tuple[str, ...]
    columns: Mapping[str, str]
    units: Mapping[str, str]  # The unit of each column of numbers, one of ``kvdrift.schema.tables.MEASURES``
    nullable: frozenset[str] = frozenset()
    identities: Mapping[str, str] = field(default_factory=dict)
    internal: bool = False  # Whether the view only serves other views and is in the schema ``internal``
    costly: bool = False  # Whether computing all rows takes longer than computing the views that pool documents

    @property
    def schema(self) -> str:
        """The name of the view's schema."""
        return "internal" if self.internal else "main"

    @property
    def comments(self) -> dict[str, str]:
        """The comment of each column in a catalogue: its meaning, with the unit of its numbers."""
        units = {name: f" [{unit}]" for name, unit in self.units.items() if unit != "none"}
        return {name: f"{meaning}{units.get(name, '')}" for name, meaning in self.columns.items()}

    @property
    def relation(self) -> str:
        """The view's name as SQL text that can follow ``from``."""
        return f"{self.schema}.{quoted(self.view)}"

    @property
    def not_null(self) -> tuple[str, ...]:
        """The columns that are never null."""
        return tuple(name for name in self.columns if name not in self.nullable)


@functools.cache
def contracts() -> Mapping[str, Contract]:
    """Return the contracts of all views by name, sorted by name."""
    by_name = {table: _stored_contract(table) for table in stored_tables()}
    by_name |= {view: _contract(view, text) for view, text in view_files(".toml").items()}
    return {view: by_name[view] for view in sorted(by_name)}


@functools.cache
def stored_tables() -> tuple[str, ...]:
    """Return the stored tables whose view has no SQL file, and so has all columns of the table unchanged."""
    files = view_files(".sql")
    return tuple(table for table in TABLES if table not in files)


def view_files(suffix: str) -> dict[str, str]:
    """Return the texts of all view files with the ending ``suffix``, by view name."""
    folders = [folder for folder in (resources.files("kvdrift.sql") / "views").iterdir() if folder.is_dir()]
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith(suffix)]
    return {file.name.removesuffix(suffix): file.read_text("utf-8") for file in files}


def contract(view: str) -> Contract:
    """Return the contract of one view."""
    known = contracts()
    if view not in known:
        raise InputError(f"no view '{view}'; {nearest(view, known)}")
    return known[view]


def comments(promised: Contract, kind: str) -> str:
    """Return the SQL statements that set the comments of a view or table (``kind``) and of its columns."""
    statements = [f"comment on {kind} {promised.relation} is {literal(promised.description)}"]
    for name, meaning in promised.comments.items():
        statements.append(f"comment on column {promised.relation}.{quoted(name)} is {literal(meaning)}")
    return "; ".join(statements)


def _stored_contract(table: str) -> Contract:
    declared = TABLES[table]
    return Contract(
        view=table,
        description=f"stored table: {declared.row}",
        grain=declared.key,
        columns=declared.meanings,
        units=declared.units,
        nullable=frozenset(field.name for field in declared.schema if field.nullable),
        internal=table in INTERNAL_TABLES,
    )


def _contract(view: str, text: str) -> Contract:
    declared = tomllib.loads(text)
    if "table" in declared:  # the view selects rows of a stored table
        changes = {name: declared[name] for name in ("description", "identities", "internal") if name in declared}
        return dataclasses.replace(
            _stored_contract(declared["table"]), view=view, grain=tuple(declared["grain"]), **changes
        )
    moments = MOMENTS[declared["moments"]] if "moments" in declared else {}
    meanings = {name: moment.meaning for name, moment in moments.items()}
    nullable = {name for name, moment in moments.items() if moment.nullable}
    units = {name: EVENTS.units[name] for name in declared["keys"] if name == "replicate"}
    units |= {name: unit for unit, names in declared.get("units", {}).items() for name in names}
    units |= {name: moment.unit for name, moment in moments.items()}
    return Contract(
        view=view,
        description=declared["description"],
        grain=tuple(declared["grain"]),
        columns={name: KEYS[name] for name in declared["keys"]} | declared.get("columns", {}) | meanings,
        units=units,
        nullable=frozenset(nullable.union(declared.get("nullable", ()))),
        identities=declared.get("identities", {}),
        internal=declared.get("internal", False),
        costly=declared.get("costly", False),
    )
