"""A new database of our own server, copied from one that Prefect made before.

Prefect makes a database by all the migrations that there ever were: seconds of the first run in every store. So the
first one is kept, empty as it is, in the user's cache, and later ones are copies of it. Nothing depends on it: what
cannot be kept or read is made by Prefect.
"""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from sql.kept_builds import cache_folder

DATABASE: Final = "prefect.db"
"""The file in the server's home, unless the user's settings name another database."""


def copy_kept(home: Path) -> bool:
    """Put a copy of the kept database into a home that has none; return whether the home has a database now."""
    place = home / DATABASE
    if place.exists():
        return True
    aside = home / f".{DATABASE}.{uuid.uuid4().hex}"
    try:
        shutil.copyfile(_kept(), aside)
        if not _is_whole(aside):
            return False
        aside.replace(place)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return True


def keep(home: Path) -> None:
    """Keep the database that a server in this home has just made, and that has no runs yet."""
    if not (home / DATABASE).is_file():
        return
    kept = _kept()
    aside = kept.with_name(f".{kept.name}.{uuid.uuid4().hex}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(home / DATABASE)) as made, closing(sqlite3.connect(aside)) as copy:
            made.backup(copy)
        aside.replace(kept)
    except (OSError, sqlite3.Error):  # a home that cannot be written to: each store has Prefect make its own
        pass
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _kept() -> Path:
    """The file of this version of Prefect, whose database no other version's is."""
    from prefect import __version__  # noqa: PLC0415 - imported where a study runs

    return cache_folder() / f"prefect-{__version__}.db"


def _is_whole(path: Path) -> bool:
    """Whether a file is a sound database that migrations have made; a power cut may have left half of it."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            (revisions,) = connection.execute("select count(*) from alembic_version").fetchone()
            return bool(revisions) and connection.execute("pragma quick_check").fetchone() == ("ok",)
    except sqlite3.Error:
        return False
