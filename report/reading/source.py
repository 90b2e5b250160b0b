"""Where a report's numbers come from: SQL views by name, and what the caller knows about the store behind them.

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
    """Anything that gives the rows of a named view."""

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: object) -> pa.Table:
        """Rows of ``view``, by its grain, whose columns equal the given values, or one of a list of values.

        They have the given ``columns``, all of the view's by default.
        """
        ...


def installed_versions() -> dict[str, str]:
    """Installed versions of the libraries that the page's numbers and figures are made with."""
    found = {}
    for name in ("kvdrift", "duckdb", "matplotlib", "numpy", "pyarrow", "scipy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(frozen=True)
class Provenance:
    """What the page's last section says: the store's name, the version of each of its tables, library versions."""

    store: str = ""
    tables: Mapping[str, int] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=installed_versions)


@dataclass(frozen=True)
class StudyRows:
    """The views of one study and one model."""

    views: ViewSource
    study: str
    model: str

    def of(self, view: str, **equal: object) -> list[ViewRow]:
        """Rows of ``view`` for this study and model."""
        rows: list[ViewRow] = self.views.rows(view, study=self.study, model=self.model, **equal).to_pylist()
        return rows

    def columns_of(self, view: str, *columns: str, **equal: object) -> pa.Table:
        """Columns of ``view``'s rows for this study and model, for who reads very many."""
        return self.views.rows(view, columns, study=self.study, model=self.model, **equal)

    def of_study(self, view: str) -> list[ViewRow]:
        """Rows of a view that has no model column."""
        rows: list[ViewRow] = self.views.rows(view, study=self.study).to_pylist()
        return rows
