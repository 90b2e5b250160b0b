"""Count the lost races of writers: attempts to make a version of a log that another writer had made."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.s3_server import S3Server

_CREATED = 0x100  # IN_CREATE of inotify(7)
_HEADER = struct.Struct("iIII")  # watch, mask, cookie, length of the name


@contextmanager
def lost_races_here(location: str, tables: Collection[str]) -> Iterator[Callable[[], int]]:
    """Count the lost races of all processes for versions of a local store's tables.

    delta-rs writes the file of a version under a name with ``#``, and then links the version's name to it, which fails
    if that name exists. So races are the files that were written but got no name.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init()
    for table in tables:
        if libc.inotify_add_watch(watch, os.fsencode(Path(location, table, "_delta_log")), _CREATED) < 0:
            raise OSError(ctypes.get_errno(), f"{location}: cannot be watched")
    tried = made = 0
    reading, over = threading.Lock(), threading.Event()

    def read() -> None:
        nonlocal tried, made
        with reading:
            while select.select([watch], [], [], 0)[0]:
                for name in _names(os.read(watch, 1 << 16)):
                    tried += ".json#" in name
                    made += name.endswith(".json")

    def go_on() -> None:
        while not over.wait(0.05):  # before the kernel's queue of 16,384 names is full
            read()

    def count() -> int:
        read()
        return tried - made

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()
        os.close(watch)


def _names(data: bytes) -> Iterator[str]:
    """Read the names of created files out of inotify's events."""
    at = 0
    while at < len(data):
        watch, _, _, length = _HEADER.unpack_from(data, at)
        if watch < 0:
            raise OSError("files were created faster than they were counted")
        at += _HEADER.size + length
        yield data[at - length : at].rstrip(b"\0").decode()


@contextmanager
def lost_races_there(server: S3Server) -> Iterator[Callable[[], int]]:
    """Count the puts of objects that a server had already; yield a function that returns the count."""
    before = server.counts()["there already"]
    yield lambda: server.counts()["there already"] - before
