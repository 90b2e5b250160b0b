"""Levels of loggers that several blocks raise at once."""

from __future__ import annotations

import logging

from kvdrift.schema.log_levels import raised_level


def test_blocks_that_overlap_restore_the_level() -> None:
    """A thread's block may end before the block of another thread that began later."""
    logger = logging.getLogger("a logger of a library")
    logger.setLevel(logging.INFO)
    first, second = (raised_level(logger.name, logging.ERROR) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.ERROR
    second.__exit__(None, None, None)
    assert logger.level == logging.INFO
    with raised_level(logger.name, logging.CRITICAL):
        assert logger.level == logging.CRITICAL
    assert logger.level == logging.INFO
