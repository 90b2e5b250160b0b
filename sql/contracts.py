"""What each view promises: its grain, its columns and what they mean, where nulls may be, what always holds.

A contract is a TOML file of the view's name. ``keys`` are the columns whose meaning is the same everywhere (KEYS
below), ``[columns]`` the view's own ones in order, ``moments`` names a family of ``schema.moments`` that follows them.
``grain`` is the unique key, ``nullable`` lists the columns that may be null, ``[identities]`` are SQL predicates that
hold on every row (which they may call ``view``), with the numerical tolerance in them. A staging view has only
``table``: the rest is in ``schema.tables``, unless it states a ``grain`` of its own.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING

from schema.errors import InputError, nearest
from schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from schema.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

KEYS = {
    "study": "name of the study",
    "model": "model id as the study file gives it",
    "split": "development or evaluation",
    "stratum": "stratum, or pooled: the mean of the strata with equal weight",
    "cluster": "documents of one cluster are resampled together",
    "doc": "document id, unique within study and model",
    "baseline": "the action that the contrast subtracts",
    "action": "action name, unique within study",
    "partner": "another action, whose documents the row is restricted to",
    "replicate": "coupled pair of continuations, from 0",
}

MOMENTS = {"scalar": SCALAR_MOMENTS, "position": POSITION_MOMENTS, "lag": LAG_MOMENTS}


@dataclass(frozen=True)
class Contract:
    """One view's promise; ``columns`` maps names, in the view's order, to their meaning."""

    view: str
    description: str
    grain: tuple[str, ...]
    columns: Mapping[str, str]
    nullable: frozenset[str] = frozenset()
    identities: Mapping[str, str] = field(default_factory=dict)

    @property
    def not_null(self) -> tuple[str, ...]:
        """The columns that are never null."""
        return tuple(name for name in self.columns if name not in self.nullable)


@functools.cache
def contracts() -> Mapping[str, Contract]:
    """The contracts of all views by name, sorted."""
    texts = view_files(".toml")
    return {view: _contract(view, texts[view]) for view in sorted(texts)}


def view_files(suffix: str) -> dict[str, str]:
    """The texts of the files of the views' folders that end in ``suffix``, by the view's name."""
    folders = [folder for folder in (resources.files("sql") / "views").iterdir() if folder.is_dir()]
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith(suffix)]
    return {file.name.removesuffix(suffix): file.read_text("utf-8") for file in files}


def contract(view: str) -> Contract:
    """The contract of one view; InputError that names the nearest view where there is none."""
    known = contracts()
    if view not in known:
        raise InputError(f"no view '{view}'; {nearest(view, known)}")
    return known[view]


def _contract(view: str, text: str) -> Contract:
    given = tomllib.loads(text)
    if "table" in given:
        table = TABLES[given["table"]]
        return Contract(
            view=view,
            description=given["description"],
            grain=tuple(given.get("grain", table.key)),
            columns={column.name: column.metadata[b"meaning"].decode() for column in table.schema},
            nullable=frozenset(column.name for column in table.schema if column.nullable),
            identities=given.get("identities", {}),
        )
    moments = MOMENTS[given["moments"]] if "moments" in given else {}
    return Contract(
        view=view,
        description=given["description"],
        grain=tuple(given["grain"]),
        columns={name: KEYS[name] for name in given["keys"]} | given.get("columns", {}) | dict(moments),
        nullable=frozenset(given.get("nullable", ())),
        identities=given.get("identities", {}),
    )
