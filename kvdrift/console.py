"""Progress on standard error while a command works, with a rate and a time left."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress if there is no terminal."""

_QUIET_SECONDS = 2.0  # seconds that work of unknown length may take without a line
_SINGULARS = {"analyses": "analysis", "studies": "study", "files of events": "file of events"}


class ConsoleProgress:
    """A listener for ``kvdrift.schema.progress``: a live bar on a terminal, an occasional line elsewhere.

    If ``at_once``, a line about present work does not wait until the work has taken a while.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        shared = sys.stdout.isatty()  # only if standard output is the terminal too do its lines belong above the bars
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=False,
            redirect_stdout=shared,
        )
        self._spinner = Live(console=self._console, transient=True, redirect_stdout=shared)
        self._quiet = 0.0 if at_once else _QUIET_SECONDS
        self._task: TaskID | None = None
        self._line: threading.Timer | None = None
        self._stage, self._unit = "", ""
        self._total = self._done = self._derived = 0
        self._began = self._said = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_doing()
        if self._task is not None:
            self._bars.stop()

    def doing(self, what: str) -> None:
        """Show the present work until a stage begins, without a time left; if there is no terminal, as one line."""
        if self._live and self._task is None:
            self._spinner.update(Spinner("dots", Text(what)))
            self._spinner.start(refresh=True)
        elif not self._live and not self._quiet:
            self.say(what)
        elif not self._live:
            self._end_doing()
            self._line = threading.Timer(self._quiet, self.say, [what])
            self._line.daemon = True  # a command that ends does not wait for this timer
            self._line.start()

    def _end_doing(self) -> None:
        self._spinner.stop()
        if self._line is not None:
            self._line.cancel()

    def derived(self, done: int, total: int) -> None:
        """Count units of a derivation; a derivation in a single commit shows no stage."""
        if not self._derived and done < total:
            self.begin("derive", total, "units")
        if self._derived or done < total:
            self.advance(done - self._derived)
            self._derived = done

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units."""
        self._stage, self._unit, self._total, self._done = stage, unit, total, 0
        self._began = self._said = time.monotonic()
        self._end_doing()
        if self._live:
            self._bars.start()
            self._task = self._bars.add_task(stage, total=total, rate="")
        else:
            self.say(progress_text(stage, 0, total, unit, 0.0))

    def advance(self, done: int) -> None:
        """Count ``done`` more units of the stage."""
        self._done += done
        now = time.monotonic()
        if self._live and self._task is not None:
            rate = self._done / max(now - self._began, 1e-9)
            self._bars.update(self._task, completed=self._done, rate=f"{rate:.2f}/s")
        elif self._done >= self._total or now - self._said >= PLAIN_SECONDS:
            self._said = now
            self.say(progress_text(self._stage, self._done, self._total, self._unit, now - self._began))

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, markup=False)
        sys.stderr.flush()


def progress_text(stage: str, done: int, total: int, unit: str, seconds: float) -> str:
    """Return the progress of a stage as a line: what is to do, then how much is done, the rate, and the time left."""
    if not done:
        return f"{stage}: {_counted(total, unit)} to do"
    rate = done / max(seconds, 1e-9)
    rest = f"about {(total - done) / rate:.0f} s left" if done < total else f"{seconds:.1f} s"
    return f"{stage}: {done} of {_counted(total, unit)}, {rate:.2f}/s, {rest}"


def _counted(number: int, unit: str) -> str:
    return f"{number} {_SINGULARS.get(unit, unit.removesuffix('s')) if number == 1 else unit}"
