"""Raise the level of a logger for a time, also from several threads at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_RAISED: dict[str, tuple[int, int]] = {}  # by logger: the number of blocks inside, and the level before the first


@contextmanager
def raised_level(name: str, level: int) -> Iterator[None]:
    """Give a logger a level inside the block; if blocks overlap, the end of the last restores the original level."""
    logger = logging.getLogger(name)
    with _LOCK:
        inside, before = _RAISED.get(name, (0, logger.level))
        _RAISED[name] = inside + 1, before
        logger.setLevel(level)
    try:
        yield
    finally:
        with _LOCK:
            inside, before = _RAISED.pop(name)
            if inside > 1:
                _RAISED[name] = inside - 1, before
            else:
                logger.setLevel(before)
