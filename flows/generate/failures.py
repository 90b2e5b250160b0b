"""Documents that fail, and the generation of the other documents all the same.

Documents are generated side by side, so several fail at first. Then each is tried alone until the faulty document is
found, and the rest are generated together again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from kvdrift.generator.generation import Work
from kvdrift.schema.errors import InputError, KvdriftError, OperationError

IN_A_ROW = 3
"""The number of documents that may fail in a row; generation then stops, since the cause lies elsewhere."""


class Trying:
    """The parts of some work that are still to be tried.

    If several documents fail in a row, the cause lies elsewhere, and no more documents are tried.
    """

    def __init__(self, work: Work) -> None:
        self._documents = len(work)
        self._parts = deque([work])
        self._failed: dict[str, KvdriftError] = {}
        self._in_a_row = 0
        self._any = False

    def parts(self) -> Iterator[Work]:
        """Yield the parts to try, as long as there are any."""
        while self._parts:
            yield self._parts.popleft()

    def document_done(self) -> None:
        """Count a document that was generated."""
        self._in_a_row, self._any = 0, True

    def part_failed(self, left: Work, error: KvdriftError) -> None:
        """Record that a part failed; ``left`` are its documents that were not generated."""
        if len(left) > 1:
            self._parts.extendleft([one] for one in reversed(left))
            return
        self._failed[left[0][0].doc] = error
        self._in_a_row += 1
        rest = [*itertools.chain(*self._parts)] if self._in_a_row < IN_A_ROW else []
        self._parts = deque([rest] if rest else [])

    def check(self) -> None:
        """Check that no document failed.

        Raises:
            KvdriftError: The error itself if nothing was generated or there is one document; else a line that names
                the documents that failed.
        """
        if not self._failed:
            return
        if self._documents == 1 or not self._any:
            raise next(iter(self._failed.values()))
        said = [
            str(error) if doc in str(error) else f"document '{doc}': {error}" for doc, error in self._failed.items()
        ]
        what = f"{len(said)} of {self._documents} documents failed; everything else that could be generated is stored"
        of_user = all(isinstance(error, InputError) for error in self._failed.values())
        raise (InputError if of_user else OperationError)(f"{what}: {'; '.join(said)}")
