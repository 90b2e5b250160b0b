"""Completion in the shell: functions that return the names that begin with ``incomplete``, the word typed so far.

No function reads rows of events, and only ``checked`` imports torch: a keystroke should be answered quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Complete = Callable[..., list[str]]

LISTED = ("selectors", "codecs", "policies", "tasks", "views", "models", "presses", "quantities", "keys", "examples")


def stores(incomplete: str) -> list[str]:
    """Return the stores one or two levels below the typed folder; if there are none, the shell completes file names."""
    folder = Path(incomplete) if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    logs = (log for depth in ("*", "*/*") for log in folder.glob(f"{depth}/events/_delta_log"))
    return _starting((str(log.parents[1]) for log in logs), incomplete)


def studies(incomplete: str) -> list[str]:
    """Return the files ``*.toml`` in the typed folder and in its subfolder ``studies``."""
    folder = Path(incomplete) if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    places = [folder, folder / "studies"]
    return _starting((str(file) for place in places for file in place.glob("*.toml")), incomplete)


def kinds(incomplete: str) -> list[str]:
    """Return the kinds of names that ``kvdrift list`` lists and that begin with ``incomplete``."""
    return _starting(LISTED, incomplete)


def examples(incomplete: str) -> list[str]:
    """Return the names of the shipped studies."""
    from kvdrift.study_files import examples

    return _starting(examples.examples(), incomplete)


def of_store(table: str, column: str) -> Complete:
    """Return a function that completes names from a column of the typed store's ``table``, which should be small."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        from kvdrift.log.store import Store
        from kvdrift.schema.errors import KvdriftError

        # If an option still lacks its value, nothing was parsed: the store is the first word.
        location = ctx.params.get("store") or next(iter(ctx.args), "")
        try:
            names = Store.open(location).read(table, columns=[column])[column].unique().to_pylist()
        except (KvdriftError, OSError):
            return []
        return _starting((name for name in names if name is not None), incomplete)

    return complete


def views(incomplete: str) -> list[str]:
    """Return a whole query for each view, except for views of the schema ``internal``, which only other views read."""
    from kvdrift import sql

    contracts = (Path(sql.__path__[0]) / "views").rglob("*.toml")
    names = sorted(path.stem for path in contracts if "\ninternal = true\n" not in path.read_text("utf-8"))
    return _starting((f"from {name}" for name in names), incomplete)


def checked(incomplete: str) -> list[str]:
    """Return the names of selectors, codecs and policies that ``kvdrift check`` takes."""
    from kvdrift.generator.codecs import CODECS
    from kvdrift.generator.selectors import SELECTORS
    from kvdrift.generator.selectors.policies import POLICIES

    return _starting([*SELECTORS, *CODECS, *POLICIES], incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})
