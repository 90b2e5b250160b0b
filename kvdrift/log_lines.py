"""``--log-json``: progress, messages and errors as one JSON object a line, with the time, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from kvdrift.console import PLAIN_SECONDS, progress_text


def write_line(level: str, message: str, **fields: Any) -> None:
    """Write one line on standard error: its time in UTC, its level, further fields that are not None, the message."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {name: value for name, value in fields.items() if value is not None}
    sys.stderr.write(json.dumps({"time": at, "level": level, **known, "message": message}, ensure_ascii=False) + "\n")
    sys.stderr.flush()


class LogLines:
    """A listener for ``kvdrift.schema.progress`` that writes JSON lines, as do libraries' warnings and logs meanwhile.

    A line of progress has ``stage``, ``done``, ``total`` and ``unit``, and, once something is done, ``rate`` in units a
    second and ``seconds_left``.
    """

    def __init__(self) -> None:
        self._stage, self._unit = "", ""
        self._total = self._done = 0
        self._began = self._said = 0.0
        self._handler = _Handler(logging.WARNING)

    def __enter__(self) -> Self:
        logging.captureWarnings(capture=True)
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(capture=False)

    def doing(self, what: str) -> None:
        """Write the present work."""
        self.say(what)

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units."""
        self._stage, self._unit, self._total, self._done = stage, unit, total, 0
        self._began = self._said = time.monotonic()
        self._write()

    def advance(self, done: int) -> None:
        """Count ``done`` more units of the stage."""
        self._done += done
        now = time.monotonic()
        if self._done >= self._total or now - self._said >= PLAIN_SECONDS:
            self._said = now
            self._write()

    def _write(self) -> None:
        seconds = time.monotonic() - self._began
        rate = self._done / max(seconds, 1e-9) if self._done else None
        write_line(
            "info",
            progress_text(self._stage, self._done, self._total, self._unit, seconds),
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
    """Writes what libraries log, and Python's warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        write_line(record.levelname.lower(), record.getMessage(), logger=record.name)
