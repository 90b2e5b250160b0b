"""Make files of a local store survive a power cut: fsync of files, and of the folders that name them.

delta-rs links and renames without fsync. The store keeps this order, so that everything a durable file relies on is
durable first:

1. data files, each before it gets its name; then the folders that name them, up to the table's own (files are synced
side by side, and so are folders);
2. log files of other tables that the commit relies on, and then the commit itself, by delta-rs;
3. the commit's log file and all earlier log files not known to be durable, since another writer's commit may not be
durable yet; then the folder ``_delta_log``. Only then is the commit acknowledged.

An object store acknowledges only durable writes, so stores behind a URL need none of this.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, TypeVar

_AT_ONCE: Final = 16

_THREAD = threading.local()

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems know no fsync of a folder: they write names through.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(opened)


def side_by_side(work: Callable[[_Item], _Result], items: Collection[_Item]) -> list[_Result]:
    """Call ``work``, which waits for the disk, with each item, in parallel; return the results in the items' order.

    The disk then writes its journal once for many items.
    """
    if len(items) <= 1 or getattr(_THREAD, "is_one_of_them", False):  # a pool thread would wait for its own pool
        return [work(item) for item in items]
    done = [_threads().submit(work, item) for item in items]
    wait(done)
    return [future.result() for future in done]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the process's thread pool, which is kept: starting threads for each commit takes a sixth of its time."""
    return ThreadPoolExecutor(_AT_ONCE, initializer=lambda: setattr(_THREAD, "is_one_of_them", True))


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked child has no threads


def make_folder(folder: Path) -> None:
    """Make a folder with its parents, and make the names of new folders durable."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)


def sync_names(root: Path, paths: Iterable[str]) -> None:
    """Make the names of files durable, by syncing every folder from a file's own up to ``root``, a table's folder."""
    folders = {parent for path in paths for parent in Path(path).parents}
    side_by_side(sync, [root / folder for folder in folders])


def replace_durably(aside: Path, target: Path) -> None:
    """Rename a finished file durably to its target, replacing an earlier file."""
    sync(aside)
    aside.replace(target)
    sync(target.parent)
