"""kvdrift: when, and for how long, KV-cache eviction makes a language model diverge from itself.

``kvdrift.open(store).sql("select * from decomposition")`` gives a DuckDB relation over a store's views;
``kvdrift.run("study.toml")`` runs a study and returns the path of its report.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sql.catalog import Views

__version__ = "0.1.0"


def open(store: str | Path) -> Views:  # noqa: A001 - kvdrift.open reads like the built-in it resembles
    """The views of a store at its present versions; ``.sql(query)`` gives a DuckDB relation.

    All cores work on a query; what is stored as an estimate is computed on one, so that it has the same last bits in
    every run. InputError where there is no store.
    """
    from schema.store.store import Store
    from sql.catalog import open_views

    return open_views(Store.open(store), threads=os.cpu_count() or 1)


def run(study: str | Path, store: str | Path | None = None) -> Path:
    """Run a study file to its report, resuming where it stopped; returns the report's path.

    A file with several models has a report for each; the last one's path is returned. ``store`` defaults to
    ``stores/NAME`` in the working folder. Raises the errors of ``schema.errors``.
    """
    from kvdrift.commands.run import run_studies
    from schema.study import load_studies

    return run_studies(load_studies(Path(study)), store).reports[-1]
