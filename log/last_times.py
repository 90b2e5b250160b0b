"""Record when a store's studies were last run and estimated, and when the store was last checked, for monitors.

A run that finds nothing to do changes no table, so these times are files in the store's folder ``.last``, one for each
study and occasion. No row depends on them. A time is recorded from this machine's clock; a time that lies ahead of the
reader's clock counts as unknown, so that no age is negative.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.fs

from kvdrift.log.delta.parquet_files import replace_file
from kvdrift.schema.location import filesystem_of, is_local, join

FOLDER: Final = ".last"
"""The store's folder of recorded times."""

_SKEW: Final = timedelta(minutes=1)  # by which the clocks of two machines with one store may differ

StudyModel: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class LastTimes:
    """The recorded times; a study, or a check, without a recorded time is missing.

    Attributes:
        runs: When each study and model was last run without a failure, also if nothing was left to do.
        estimates: When estimates of each study and model were last stored, and the events version behind them.
        check: When the store was last verified.
        faults: The most faults that a check found since the last check of everything, that check included.
    """

    runs: dict[StudyModel, datetime] = field(default_factory=dict)
    estimates: dict[StudyModel, tuple[datetime, int]] = field(default_factory=dict)
    check: datetime | None = None
    faults: int | None = None


def record_run(location: str, study: str, model: str) -> None:
    """Record that a run of a study and model has ended without a failure."""
    _record(location, {"what": "run", "study": study, "model": model})


def record_estimates(location: str, study: str, model: str, events_version: int) -> None:
    """Record that estimates of an events version are about to be stored.

    A process that is killed before it stores them leaves a record of a version without estimates, which readers of
    the record notice. Without this record, the record of earlier estimates would remain and look right.
    """
    _record(location, {"what": "estimate", "study": study, "model": model, "events_version": events_version})


def record_check(location: str, faults: int, *, whole: bool) -> None:
    """Record that a store was verified; only a check of the ``whole`` store clears the faults of earlier checks."""
    before = 0 if whole else last_times(location).faults or 0
    _record(location, {"what": "check", "faults": max(faults, before)})


def last_times(location: str) -> LastTimes:
    """Read the recorded times of a store; records that cannot be read are missing."""
    times, now = LastTimes(), datetime.now(UTC)
    check, faults = None, None
    for record in _records(location):
        try:
            at = datetime.fromisoformat(record["at"])
            if at > now + _SKEW:
                continue
            at = min(at, now)
            if record["what"] == "check":
                check, faults = at, int(record["faults"])
            elif record["what"] == "run":
                times.runs[record["study"], record["model"]] = at
            elif record["what"] == "estimate":
                times.estimates[record["study"], record["model"]] = at, int(record["events_version"])
        except (KeyError, TypeError, ValueError):
            continue
    return LastTimes(times.runs, times.estimates, check, faults)


def _record(location: str, record: dict[str, Any]) -> None:
    """Write a record in place of the earlier one of its study and occasion, unless the store is read-only."""
    named = json.dumps([record.get(name) for name in ("what", "study", "model")])
    name = f"{record['what']}-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"
    data = json.dumps({**record, "at": datetime.now(UTC).isoformat(timespec="seconds")}).encode()
    with suppress(OSError, pa.ArrowException):
        if is_local(location):
            for left in Path(location, FOLDER).glob(f".{name}.*"):  # by a killed process
                left.unlink()
            replace_file(Path(location, FOLDER, name), data)
            return
        files, path = filesystem_of(join(location, FOLDER, name))
        with files.open_output_stream(path) as sink:
            sink.write(data)


def _records(location: str) -> list[dict[str, Any]]:
    records = []
    with suppress(OSError, pa.ArrowException):
        files, folder = filesystem_of(join(location, FOLDER))
        for info in files.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
            if info.extension != "json":
                continue
            with suppress(OSError, ValueError), files.open_input_stream(info.path) as source:
                record = json.loads(source.read())
                if isinstance(record, dict):
                    records.append(record)
    return records
