"""Small files put together beside a live derivation, in a process of its own.

What many files of all sizes leave in a process's memory is then not left in the derivation's: the process does this
some times, and another one takes its place.
"""

from __future__ import annotations

import select
import subprocess
import sys
from typing import Self

from log.store import Store
from schema.errors import KvdriftError, OperationError, first_line
from schema.own_process import last_words, own_environment

LIVE_ROWS = 1 << 15  # of a new file: what is held no longer than a batch takes
BATCHES = 16  # micro-batches from one time to the next; each leaves one file
_TIMES = 32  # that a process does it

_DONE = "done"


class Gathering:
    """Puts small files together while a derivation goes on, which does not wait for it.

    Args:
        location: The store, as an absolute path or URL.

    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._process: subprocess.Popen[str] | None = None
        self._batches = self._times = 0
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for what is under way, and end the process; raise what ``batch_done`` does."""
        if kind is None and self._running:
            self._hear()
        self._leave()

    def batch_done(self) -> None:
        """Count a micro-batch, and begin after some of them, unless it is still under way."""
        self._batches += 1
        if self._batches >= BATCHES:
            self._hear_if_done()
            if not self._running:
                self._begin()

    def _begin(self) -> None:
        if self._times == _TIMES:
            self._leave()
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", __name__, self._location],
                env=own_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,  # Ctrl-C is for the derivation
            )
        self._batches, self._times, self._running = 0, self._times + 1, True
        try:
            print(file=self._process.stdin)
        except BrokenPipeError:
            self._hear()

    def _hear_if_done(self) -> None:
        if self._running and self._process is not None and self._process.stdout is not None:
            spoken, _, _ = select.select([self._process.stdout], [], [], 0)
            if spoken:
                self._hear()

    def _hear(self) -> None:
        """Read what the process says once it is done."""
        assert self._process is not None and self._process.stdout is not None  # noqa: S101, PT018 - it was begun
        said, self._running = self._process.stdout.readline(), False
        if said.strip() != _DONE:
            process, self._process = self._process, None
            _, why = process.communicate()
            raise OperationError(f"putting files together: {last_words(why, process.returncode)}")

    def _leave(self) -> None:
        """Let the process end."""
        if self._process is not None:
            self._process.communicate()
        self._process, self._times = None, 0


def serve(location: str) -> None:
    """Put small files together for each line that comes, and say so, until there are no more: its caller is gone."""
    store = Store.open(location)
    for _ in sys.stdin:
        store.gather(LIVE_ROWS)
        sys.stdout.write(f"{_DONE}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except KvdriftError as error:
        sys.exit(first_line(error))
