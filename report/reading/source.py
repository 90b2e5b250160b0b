"""Where a report's numbers come from: SQL views by name, and what the caller knows about the store behind them.

The report does not know how a view is computed or stored. It reads these views, by their contract columns:
``studies``, ``documents``, ``actions``, ``units``, ``plans``, ``trajectories`` and ``events`` for facts and examples,
``estimates`` for everything with an interval, and the point views named in ``report.reading.quantities`` where
estimates lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import pyarrow as pa

Row = dict[str, Any]


class ViewSource(Protocol):
    """Anything that gives the rows of a named view."""

    def rows(self, view: str, **equal: object) -> pa.Table:
        """Rows of ``view`` whose columns equal the given values."""
        ...


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that the page's numbers and figures are made with, as installed here."""
    found = {}
    for name in ("duckdb", "matplotlib", "numpy", "pyarrow", "scipy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Provenance:
    """What stands in the page's last section: the store as its reader knows it, and versions."""

    store: str = ""
    tables: Mapping[str, int] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=installed_versions)


@dataclass(frozen=True)
class StudyRows:
    """The views of one study and one model."""

    views: ViewSource
    study: str
    model: str

    def of(self, view: str, **equal: object) -> list[Row]:
        """Rows of ``view`` for this study and model."""
        rows: list[Row] = self.views.rows(view, study=self.study, model=self.model, **equal).to_pylist()
        return rows

    def of_study(self, view: str, **equal: object) -> list[Row]:
        """Rows of a view that has no model column."""
        rows: list[Row] = self.views.rows(view, study=self.study, **equal).to_pylist()
        return rows
