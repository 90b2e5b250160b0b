"""Completion in the shell, from names and folders alone: a keystroke must not load heavy libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Complete = Callable[..., list[str]]

LISTED = ("selectors", "codecs", "policies", "tasks", "views", "models", "quantities", "keys", "examples")


def stores(incomplete: str) -> list[str]:
    """Return local folders that hold a store; if there are none, the shell completes file names."""
    folder = Path(incomplete) if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    logs = (log for depth in ("*", "*/*") for log in folder.glob(f"{depth}/events/_delta_log"))
    return _starting((str(log.parents[1]) for log in logs), incomplete)


def studies(incomplete: str) -> list[str]:
    """Return study files below the folder that was typed so far."""
    folder = Path(incomplete) if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    places = [folder, folder / "studies"]
    return _starting((str(file) for place in places for file in place.glob("*.toml")), incomplete)


def kinds(incomplete: str) -> list[str]:
    """Return the kinds of names that ``kvdrift list`` lists."""
    return _starting(LISTED, incomplete)


def examples(incomplete: str) -> list[str]:
    """Return the names of the shipped studies."""
    from kvdrift.study_files import examples

    return _starting(examples.examples(), incomplete)


def of_store(table: str, column: str) -> Complete:
    """Return a completer of the names in one column of a small table of the typed store."""

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
    """Return a whole query for each view; views of the schema ``internal``, steps to others, are left out."""
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
