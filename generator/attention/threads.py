"""The number of threads with which torch computes, in a block of code.

In a block of ``at_most`` the number follows the number of free processors, layer by layer. So results in such a block
must not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvdrift.schema.free_processors import FREE_PROCESSORS

_own = threading.local()  # most: how many threads the present block of this thread may take


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch use ``threads`` threads inside the block, and its earlier number after it; None changes nothing."""
    before, most = torch.get_num_threads(), _most()
    if threads is not None:
        torch.set_num_threads(threads)
        _own.most = 1
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _own.most = most


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Let torch use as many threads inside the block as processors are free, at most ``threads``."""
    with torch_threads(FREE_PROCESSORS.threads(threads)):
        _own.most = threads
        yield


def adapt() -> None:
    """Choose torch's number of threads anew in a block of ``at_most``; elsewhere change nothing."""
    if (most := _most()) > 1 and (threads := FREE_PROCESSORS.threads(most)) != torch.get_num_threads():
        torch.set_num_threads(threads)


def stay_alone() -> None:
    """Use one thread until the end of the innermost block of ``torch_threads`` or ``at_most``."""
    _own.most = 1
    torch.set_num_threads(1)


def _most() -> int:
    most: int = getattr(_own, "most", 1)
    return most
