"""Progress on standard error while a command works, with a rate and a time left: for people, or as lines of JSON."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import time
import warnings
from datetime import UTC, datetime
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress if there is no terminal."""

QUIET_SECONDS = 2.0  # seconds that work of unknown length may take without a line


class Listener:
    """A listener for ``kvdrift.schema.progress``: counts the units of a stage, and says a line now and then."""

    def __init__(self) -> None:
        self._stage, self._unit = "", ""
        self._total = self._done = self._derived = 0
        self._began = self._last_printed = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def doing(self, what: str) -> None:
        """Show the present work, whose length is not known."""
        self.say(what)

    def derived(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units are derived, unless all of them are derived in a single commit."""
        if not self._derived and done < total:
            self.begin("derive", total, "units")
        if self._derived or done < total:
            self.advance(done - self._derived)
            self._derived = done

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units."""
        self._stage, self._unit, self._total, self._done = stage, unit, total, 0
        self._began = self._last_printed = time.monotonic()
        self.show()

    def advance(self, done: int) -> None:
        """Count ``done`` more units of the stage."""
        self._done += done
        now = time.monotonic()
        if self._done >= self._total or now - self._last_printed >= PLAIN_SECONDS:
            self._last_printed = now
            self.show()

    def show(self) -> None:
        """Show the progress of the stage as a line."""
        self.say(self._stage_line())

    def _stage_line(self) -> str:
        return progress_text(self._stage, self._done, self._total, self._unit, time.monotonic() - self._began)

    def say(self, line: str) -> None:
        """Show one line; this listener shows nothing."""


class ConsoleProgress(Listener):
    """Shows progress to people: a live bar on a terminal, an occasional line elsewhere.

    If ``at_once``, the line about the present work is printed immediately, not after ``QUIET_SECONDS``.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__()
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
        self._quiet = 0.0 if at_once else QUIET_SECONDS
        self._task: TaskID | None = None
        self._line: threading.Timer | None = None

    def __exit__(self, *_: object) -> None:
        self._end_doing()
        if self._task is not None:
            self._bars.stop()

    def doing(self, what: str) -> None:
        """Show the present work until a stage begins; if there is no terminal, as one line."""
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

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units."""
        self._end_doing()
        if self._live:
            self._bars.start()
            self._task = self._bars.add_task(stage, total=total, rate="")
        super().begin(stage, total, unit)

    def advance(self, done: int) -> None:
        """Count ``done`` more units of the stage."""
        super().advance(done)
        if self._task is not None:
            rate = self._done / max(time.monotonic() - self._began, 1e-9)
            self._bars.update(self._task, completed=self._done, rate=f"{rate:.2f}/s")

    def show(self) -> None:
        """Show the progress of the stage as a line, if there is no terminal."""
        if not self._live:
            super().show()

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, markup=False)
        sys.stderr.flush()


class NotebookProgress(Listener):
    """Shows progress below a notebook's cell: a line for each stage, which changes while the stage goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: Any = None  # the line of the present stage

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units on a new line."""
        self._shown = None
        super().begin(stage, total, unit)

    def advance(self, done: int) -> None:
        """Count ``done`` more units of the stage, and show them."""
        self._done += done
        self.show()

    def show(self) -> None:
        """Show the progress of the stage in the stage's line."""
        display = importlib.import_module("IPython.display").display  # every notebook has IPython
        line = {"text/plain": self._stage_line()}
        if self._shown is None:
            self._shown = display(line, raw=True, display_id=True)
        else:
            self._shown.update(line, raw=True)

    def say(self, line: str) -> None:
        """Print one line."""
        print(line)  # noqa: T201 - below the cell


class LogLines(Listener):
    """Writes progress, and the warnings and logs of libraries, as JSON lines with the time, for ``--log-json``.

    A line of progress has ``stage``, ``done``, ``total`` and ``unit``, and, once something is done, ``rate`` in units a
    second and ``seconds_left``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handler = _Handler(logging.WARNING)

    def __enter__(self) -> Self:
        logging.captureWarnings(capture=True)
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(capture=False)

    def show(self) -> None:
        """Write the progress of the stage."""
        seconds = time.monotonic() - self._began
        rate = self._done / max(seconds, 1e-9) if self._done else None
        write_line(
            "info",
            self._stage_line(),
            stage=self._stage,
            done=self._done,
            total=self._total,
            unit=self._unit,
            rate=None if rate is None else round(rate, 4),
            seconds_left=None if rate is None else round((self._total - self._done) / rate, 1),
        )

    def say(self, line: str) -> None:
        """Write one line."""
        write_line("info", line)


class _Handler(logging.Handler):
    """Writes log records of libraries, and Python's warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        write_line(record.levelname.lower(), record.getMessage(), logger=record.name)


def write_line(level: str, message: str, **fields: Any) -> None:
    """Write a line of JSON on standard error: time in UTC, level, further fields that are not None, the message."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {name: value for name, value in fields.items() if value is not None}
    sys.stderr.write(json.dumps({"time": at, "level": level, **known, "message": message}, ensure_ascii=False) + "\n")
    sys.stderr.flush()


def progress_text(stage: str, done: int, total: int, unit: str, seconds: float) -> str:
    """Return a stage's progress after some seconds as a line: its name, the count, the rate, and the time left."""
    counted = f"{total} {unit.removesuffix('s') if total == 1 else unit}"
    if not done:
        return f"{stage}: {counted} to do"
    rate = done / max(seconds, 1e-9)
    rest = f"about {(total - done) / rate:.0f} s left" if done < total else f"{seconds:.1f} s"
    return f"{stage}: {done} of {counted}, {rate:.2f}/s, {rest}"


def listener(*, shown: bool, at_once: bool = False) -> Listener:
    """Return the listener of a run in Python: in a notebook, on a terminal, or silent."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    notebook = hasattr(shell, "kernel")
    if notebook:
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, without ipywidgets; no bar of tqdm is shown
    if not shown:
        return Listener()
    return NotebookProgress() if notebook else ConsoleProgress(at_once=at_once)
