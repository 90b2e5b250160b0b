"""A study's flow run in Prefect: its tasks, and its page with lines, progress and results.

The keys of artifacts are the same in every run of a study, so that the next run adds a version to each artifact.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from uuid import UUID

from kvdrift.log.checked_files import WEEK
from kvdrift.log.store import Store
from kvdrift.schema.errors import ControlError, DamagedStoreError, InputError
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.study import POOLED

DELAYS = (10.0, 60.0, 300.0)  # seconds before the second, third and fourth try of a stage
_FOR_GOOD = (InputError, ControlError, DamagedStoreError)


def as_stage(function: Callable[..., object], idle: str = "", **options: Any) -> Any:
    """Return a stage as a task of the running flow; with the reason ``idle``, one that did nothing ends as "Skipped".

    That state is Prefect's Completed under another name: for tasks that wait for this task, it has succeeded. Prefect's
    cache is off, since it would skip the second derivation of a flow; the store knows what is done.
    """
    from prefect import task  # noqa: PLC0415 - once Prefect's environment is set
    from prefect.cache_policies import NO_CACHE  # noqa: PLC0415
    from prefect.states import Completed  # noqa: PLC0415

    @wraps(function)
    def stage(*arguments: Any) -> object:
        done = function(*arguments)
        return done if done or not idle else Completed(name="Skipped", message=idle)

    name = function.__name__.removeprefix("_")
    return task(name=name, cache_policy=NO_CACHE, persist_result=False, **options)(stage)


def retried() -> dict[str, Any]:
    """Return the options of a task that Prefect retries after an error, if a retry may help.

    A task is not retried after an error that a person must mend: a mistake in the study file, a control that is not 0,
    a damaged store.
    """
    return {"retries": len(DELAYS), "retry_delay_seconds": list(DELAYS), "retry_condition_fn": may_pass}


def may_pass(_task: Any, _task_run: Any, state: Any) -> bool:
    """Return whether a retry of the task may avoid the error."""
    return not isinstance(state.data, _FOR_GOOD)


_UPDATE_SECONDS = 2.0  # between two updates of the progress
_COLUMNS = (
    "action", "documents", "trajectories", "mismatch", "occurrence", "exposure", "mismatch_rate",
    "divergence_probability", "mean_entry",
)  # fmt: skip
_DIGITS = 6


class FlowRunPage:
    """A progress listener that forwards all events to another listener and, once open, shows them in the flow run.

    An event that the server refuses is not shown; the work goes on.
    """

    def __init__(self, listener: Progress = SILENT) -> None:
        self._listener = listener
        self._key: str | None = None
        self._artifact: UUID | None = None
        self._stage, self._unit = "", ""
        self._total = self._done = 0
        self._updated = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a flow run shows the events of this listener."""
        return self._key is not None

    def open(self, name: str) -> None:
        """Show everything from now on in the current flow run; artifacts are named after ``name``."""
        self._key = artifact_key(name)

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units."""
        self._listener.begin(stage, total, unit)
        self._stage, self._unit, self._total, self._done = stage, unit, total, 0
        self._log(f"{stage}: {total} {unit}")
        self._show_progress()

    def advance(self, done: int) -> None:
        """Count ``done`` more units of the stage."""
        self._listener.advance(done)
        self._done += done
        if self._done >= self._total or time.monotonic() - self._updated >= _UPDATE_SECONDS:
            self._show_progress()

    def say(self, line: str) -> None:
        """Forward a line, and log it."""
        self._listener.say(line)
        self._log(line)

    def publish(self, store: Store, study: str, model: str, report: Path) -> None:
        """Show a study's results: the decomposition, the first sentences of the report, and a link to the report."""
        if self._key is not None:
            study_key = artifact_key(study)  # if there are several samplings, or several studies in a store
            key = "-".join([self._key, *([study_key] if study_key != self._key else []), artifact_key(model)])
            self._shown(lambda: _publish(key, store, study, model, report))

    def _log(self, line: str) -> None:
        if self.is_open:
            self._shown(lambda: _flow_run_logger().info(line))

    def _show_progress(self) -> None:
        if self._key is None:
            return
        self._updated = time.monotonic()
        share = 100.0 * self._done / self._total if self._total else 100.0
        words = f"{self._stage}: {self._done} of {self._total} {self._unit}"
        self._shown(lambda: self._put_progress(f"{self._key}-progress", share, words))

    def _put_progress(self, key: str, share: float, words: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact  # noqa: PLC0415

        if self._artifact is None:
            made: Any = create_progress_artifact(progress=share, key=key, description=words)
            self._artifact = made
        else:
            update_progress_artifact(self._artifact, progress=share, description=words)

    @staticmethod
    def _shown(show: Callable[[], object]) -> None:
        try:
            show()
        except Exception as error:  # noqa: BLE001 - the page is not the work
            _flow_run_logger().warning("this run goes on, but its page lacks an event: %s", error)


def artifact_key(name: str) -> str:
    """Convert a name to the form of an artifact's key in Prefect: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "study"


def _publish(key: str, store: Store, study: str, model: str, report: Path) -> None:
    from prefect.artifacts import (  # noqa: PLC0415
        create_link_artifact,
        create_markdown_artifact,
        create_table_artifact,
    )

    from kvdrift.report.reading.content import read_content  # noqa: PLC0415
    from kvdrift.report.reading.estimates import StudyRows  # noqa: PLC0415
    from kvdrift.report.sections.contrasts import contrasts_table  # noqa: PLC0415 - if there is something to show
    from kvdrift.report.sections.verdict import verdict_record  # noqa: PLC0415
    from kvdrift.sql.catalog import open_views  # noqa: PLC0415

    with open_views(store, checked_within=WEEK) as views:
        rows = StudyRows(views, study, model)
        content = read_content(rows)
        decomposition = rows.of("decomposition", split=content.split, stratum=POOLED)
        verdict = verdict_record(content)
        differences = contrasts_table(content) if content.others else None
    where = f"study '{study}', model {model}, {content.split} documents, all strata"
    table = [{name: _cell(row[name]) for name in _COLUMNS} for row in decomposition]
    create_table_artifact(table=table, key=f"{key}-decomposition", description=f"Decomposition: {where}. Fractions.")
    badges = ", ".join(f"{row['action']}: {row['badge']}" for row in verdict["actions"])
    headline = [f"**{verdict['sentence']}** {' '.join(verdict['remarks'])}", badges]
    if differences is not None:
        heads = [f"{column.head} ({column.unit})" for column in differences.columns[1:]]
        for name, *cells in (row.cells for row in differences.rows):
            numbers = [f"{head} {cell.text} {cell.under}" for head, cell in zip(heads, cells, strict=True)]
            headline.append(f"{name.text}: {'; '.join(numbers)}")
    create_markdown_artifact(
        markdown="\n\n".join(headline), key=f"{key}-headline", description=f"What was found: {where}."
    )
    create_link_artifact(
        link=report.absolute().as_uri(), link_text=str(report), key=f"{key}-report", description=f"Report: {where}."
    )


def _cell(value: object) -> object:
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else None
    return value


def _flow_run_logger() -> Any:
    from prefect import get_run_logger  # noqa: PLC0415

    return get_run_logger()
