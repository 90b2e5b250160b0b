"""What makes files of a local store survive a power cut: fsync of files, and of the folders that name them.

delta-rs links and renames without any fsync. The order that the store keeps, so that what a durable file relies on is
durable before it is:

1. data files, each before it gets its name; then the folders that name them, up to the table's own (files are synced
   side by side, and so are folders);
2. log files of other tables that the commit relies on, and then the commit itself, by delta-rs;
3. the commit's log file with every one below it that is not known to be durable, since another writer's commit may not
   be so yet; then the folder ``_delta_log``. Only now is the commit acknowledged.

An object store acknowledges what is durable, so none of this is for stores behind a URL.
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

_OWN = threading.local()

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable.

    Raises:
        OSError: The file system cannot do it.

    """
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
    """Do work on items that waits for the disk: it writes its journal once for many of them.

    Returns:
        The results in the order of the items.

    """
    if len(items) <= 1 or getattr(_OWN, "is_one_of_them", False):  # which would wait for themselves
        return [work(item) for item in items]
    done = [_threads().submit(work, item) for item in items]
    wait(done)
    return [one.result() for one in done]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """The threads of this process, which stay: to start them for each commit takes a sixth of its time."""
    return ThreadPoolExecutor(_AT_ONCE, initializer=lambda: setattr(_OWN, "is_one_of_them", True))


os.register_at_fork(after_in_child=_threads.cache_clear)  # it has none of them


def make_folder(folder: Path) -> None:
    """Make a folder with its parents; the names of those that were not there are durable."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)


def sync_names(root: Path, paths: Iterable[str]) -> None:
    """Make the names of files durable: every folder from theirs up to the root.

    Args:
        root: A table's folder.
        paths: Files relative to it.

    """
    folders = {parent for path in paths for parent in Path(path).parents}
    side_by_side(sync, [root / folder for folder in folders])


def replace_durably(aside: Path, target: Path) -> None:
    """Give a finished file its name, in place of what had it; content and name are durable then."""
    sync(aside)
    aside.replace(target)
    sync(target.parent)
