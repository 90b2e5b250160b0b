"""A new database for our own server, copied from a database that Prefect made before.

Prefect makes a database by running all past migrations, which takes seconds in the first run of every store. So the
first database is kept in the user's cache while it is empty, and later databases are copies. If the kept database
cannot be written or read, Prefect makes a new one.
"""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from kvdrift.sql.kept_builds import cache_folder

DATABASE: Final = "prefect.db"
"""The file in the server's home, unless the user's settings name another database."""


def copy_kept(home: Path) -> bool:
    """Copy the kept database into a home without one; return whether the home has a database now."""
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
    """Keep the database that a server in this home has just made, while it has no runs."""
    if not (home / DATABASE).is_file():
        return
    kept = _kept()
    aside = kept.with_name(f".{kept.name}.{uuid.uuid4().hex}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(home / DATABASE)) as made, closing(sqlite3.connect(aside)) as copy:
            made.backup(copy)
        aside.replace(kept)
    except (OSError, sqlite3.Error):  # the cache cannot be written: Prefect makes each store's database
        pass
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _kept() -> Path:
    """Return the kept file for this version of Prefect, since other versions have other databases."""
    from prefect import __version__  # noqa: PLC0415 - imported where a study runs

    return cache_folder() / f"prefect-{__version__}.db"


def _is_whole(path: Path) -> bool:
    """Tell whether a file is a sound, migrated database; a power cut may have left half a file."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            (revisions,) = connection.execute("select count(*) from alembic_version").fetchone()
            return bool(revisions) and connection.execute("pragma quick_check").fetchone() == ("ok",)
    except sqlite3.Error:
        return False
