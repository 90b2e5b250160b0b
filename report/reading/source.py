"""The source of a report's numbers: SQL views by name, and facts that the caller gives about the store.

The report does not know how a view is computed or stored. Columns are read strictly: a view without a column of its
contract is a ``KeyError``, never a dash on the page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import pyarrow as pa

ViewRow = dict[str, Any]


class ViewSource(Protocol):
    """An object that returns the rows of a named view."""

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: object) -> pa.Table:
        """Return the rows of ``view``, in order of its grain, whose columns equal the given values.

        A list stands for any of its values. The rows have the given ``columns``, by default all of the view's.
        """
        ...


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that make the page's numbers and figures."""
    found = {}
    for name in ("kvdrift", "duckdb", "matplotlib", "numpy", "pyarrow", "scipy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(frozen=True)
class Provenance:
    """What a page says of the store: its name, the version of each table, library versions, and what waits."""

    store: str = ""
    tables: Mapping[str, int] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=installed_versions)
    waiting: str = ""  # the study's replicates that lack positions, counted in words; empty if there are none


@dataclass(frozen=True)
class StudyRows:
    """The views of one study and one model."""

    views: ViewSource
    study: str
    model: str

    def of(self, view: str, **equal: object) -> list[ViewRow]:
        """Return the rows of ``view`` for this study and model."""
        rows: list[ViewRow] = self.views.rows(view, study=self.study, model=self.model, **equal).to_pylist()
        return rows

    def columns_of(self, view: str, *columns: str, **equal: object) -> pa.Table:
        """Return columns of ``view`` for this study and model as a table, for callers who read very many rows."""
        return self.views.rows(view, columns, study=self.study, model=self.model, **equal)

    def of_study(self, view: str) -> list[ViewRow]:
        """Return the rows of a view that has no model column."""
        rows: list[ViewRow] = self.views.rows(view, study=self.study).to_pylist()
        return rows
