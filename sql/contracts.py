"""What each view promises: its grain, its columns and what they mean, where nulls may be, what always holds.

A view that computes something has a contract in a TOML file beside its SQL. ``keys`` are the columns whose meaning is
the same everywhere (KEYS below), ``[columns]`` the view's own ones in order, ``moments`` names a family of
``schema.moments`` that follows them. ``[units]`` lists the columns of each unit, and has every column of numbers.
``grain`` is the unique key, ``nullable`` lists the columns that may be null, ``[identities]`` are SQL predicates that
hold on every row (which they may call ``view``), with the numerical tolerance in them. ``table`` stands in place of
columns for a view that selects rows of a stored table. ``internal = true`` puts a view that is a step to others into
the schema ``internal``, out of the list of what people query; ``costly = true`` says that people ask for some of its
rows, since all of a large store would take long.

The view of a stored table has no file: ``schema.tables`` declares its columns, their meaning and its grain.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING

from schema.errors import InputError, nearest
from schema.moments import ANSWER_MOMENTS, LAG_MOMENTS, MOMENT_UNITS, POSITION_MOMENTS, SCALAR_MOMENTS
from schema.tables import DOCUMENTS, EVENTS, TABLES
from sql.quoting import literal, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

# The columns that mean the same in every view.
KEYS = {
    **{name: EVENTS.meanings[name] for name in ("study", "model", "doc", "action", "replicate")},
    **{name: DOCUMENTS.meanings[name] for name in ("split", "cluster")},
    "stratum": "stratum, or pooled: the mean of the strata with equal weight",
    "baseline": "the action that the contrast subtracts",
    "partner": "another action, whose documents the row is restricted to",
}

# Stored tables whose rows people find in other views: newest ones in estimates, plan and sequence, means in swrb.
INTERNAL_TABLES = ("branching_depths", "branchings", "identities", "looks", "plans", "results")

MOMENTS = {"scalar": SCALAR_MOMENTS, "position": POSITION_MOMENTS, "lag": LAG_MOMENTS, "answer": ANSWER_MOMENTS}


@dataclass(frozen=True)
class Contract:
    """One view's promise; ``columns`` maps names, in the view's order, to their meaning.

    Attributes:
        units: The unit of each column of numbers, one of ``schema.tables.MEASURES``.
        internal: Whether it is a step to other views, in the schema ``internal``.
        costly: Whether all of its rows take longer to compute than those of the views that pool documents.

    """

    view: str
    description: str
    grain: tuple[str, ...]
    columns: Mapping[str, str]
    units: Mapping[str, str]
    nullable: frozenset[str] = frozenset()
    identities: Mapping[str, str] = field(default_factory=dict)
    internal: bool = False
    costly: bool = False

    @property
    def schema(self) -> str:
        """The schema that has the view."""
        return "internal" if self.internal else "main"

    @property
    def comments(self) -> dict[str, str]:
        """What each column means, with the unit of its numbers, as a catalogue says it."""
        units = {name: f" [{unit}]" for name, unit in self.units.items() if unit != "none"}
        return {name: f"{meaning}{units.get(name, '')}" for name, meaning in self.columns.items()}

    @property
    def relation(self) -> str:
        """The view as it stands after ``from``."""
        return f"{self.schema}.{quoted(self.view)}"

    @property
    def one_of_each(self) -> str:
        """The condition that leaves one split, and the rows that pool the strata; empty where a view has no others."""
        split = ["split = 'evaluation'"] if "split" in self.columns else []
        return " and ".join([*split, *(["stratum = 'pooled'"] if "stratum" in self.grain else [])])

    @property
    def not_null(self) -> tuple[str, ...]:
        """The columns that are never null."""
        return tuple(name for name in self.columns if name not in self.nullable)


@functools.cache
def contracts() -> Mapping[str, Contract]:
    """The contracts of all views by name, sorted."""
    found = {table: _stored_contract(table) for table in stored_tables()}
    found |= {view: _contract(view, text) for view, text in view_files(".toml").items()}
    return {view: found[view] for view in sorted(found)}


@functools.cache
def stored_tables() -> tuple[str, ...]:
    """The stored tables whose view has their rows as they are; a table's view with a file of its own selects some."""
    files = view_files(".sql")
    return tuple(table for table in TABLES if table not in files)


def view_files(suffix: str) -> dict[str, str]:
    """The texts of the files of the views' folders that end in ``suffix``, by the view's name."""
    folders = [folder for folder in (resources.files("sql") / "views").iterdir() if folder.is_dir()]
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith(suffix)]
    return {file.name.removesuffix(suffix): file.read_text("utf-8") for file in files}


def contract(view: str) -> Contract:
    """The contract of one view."""
    known = contracts()
    if view not in known:
        raise InputError(f"no view '{view}'; {nearest(view, known)}")
    return known[view]


def comments(promised: Contract, kind: str) -> str:
    """The statements that give a view, or the table in its place (``kind``), and its columns their meaning."""
    said = [f"comment on {kind} {promised.relation} is {literal(promised.description)}"]
    for name, meaning in promised.comments.items():
        said.append(f"comment on column {promised.relation}.{quoted(name)} is {literal(meaning)}")
    return "; ".join(said)


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
    given = tomllib.loads(text)
    if "table" in given:  # some rows of a stored table
        own = {name: given[name] for name in ("description", "identities", "internal") if name in given}
        return dataclasses.replace(_stored_contract(given["table"]), view=view, grain=tuple(given["grain"]), **own)
    moments = MOMENTS[given["moments"]] if "moments" in given else {}
    units = {name: EVENTS.units[name] for name in given["keys"] if name == "replicate"}
    units |= {name: unit for unit, names in given.get("units", {}).items() for name in names}
    units |= {name: MOMENT_UNITS[name] for name in moments}
    return Contract(
        view=view,
        description=given["description"],
        grain=tuple(given["grain"]),
        columns={name: KEYS[name] for name in given["keys"]} | given.get("columns", {}) | dict(moments),
        units=units,
        nullable=frozenset(given.get("nullable", ())),
        identities=given.get("identities", {}),
        internal=given.get("internal", False),
        costly=given.get("costly", False),
    )
