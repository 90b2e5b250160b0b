"""A study as it grows night after night: after each night every view is that of a store made at once from the same files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.own_files import prompts, write_own_study
from fixtures.processes import start_process
from fixtures.small_study import run_of
from fixtures.study_files import load_study

import kvdrift
from flows.run import stages
from flows.run.comparison import check_agrees
from flows.run.revisions import redo_actions
from flows.run.study_run import DocumentLimit, StudyRun

Rows = list[dict[str, Any]]

# Views that say how a store came to be rather than what was measured, and what else depends on that alone.
OF_THE_HISTORY = {
    "units", "revisions", "superseded_plans", "superseded_documents", "superseded_analyses", "superseded_actions", "plan", "published",
}  # fmt: skip
OF_THE_RUN = {
    "action_revision", "baseline_revision", "document_revision", "documents_revision", "prefill_seconds",
    "decode_seconds", "events_version", "plan_sha256", "inputs_sha256", "study_sha256", "settings", "unit", "status",
    "prespecified", "frozen_at", "seconds", "first_replicate", "replicates",
}  # fmt: skip
TOLERANCE = 1e-12  # sums are over the same numbers in the order of files, which differs between the stores


@dataclass
class Study:
    """A study file and its prompts as they are on a night, and the store that has grown so far."""

    folder: Path
    rows: Rows
    changes: list[tuple[str, str]] = field(default_factory=list)

    def run(self, *, limit: int | None = None, replan: bool = False) -> StudyRun:
        self.folder.mkdir(exist_ok=True)
        run = run_of(load_study(write_own_study(self.folder, self.rows, *self.changes)), self.folder / "store")
        return replace(run, limit=DocumentLimit(limit), replan=replan)

    def made_at_once(self, folder: Path) -> StudyRun:
        """Return the same study in a store of its own, with the prompts of the file that this study has taken."""
        taken = set(self.run().store.read("documents")["doc"].to_pylist())
        run = Study(folder, [row for row in self.rows if row["id"] in taken], self.changes).run()
        finish(run)
        return run


def finish(run: StudyRun, *redo: str) -> None:
    """Do the work of a night: all stages up to the estimates."""
    if (Path(run.location) / "events").exists():
        check_agrees(run, redo)
        redo_actions([run], redo)
    for stage in (
        stages.prepare, stages.develop, stages.derive, stages.score, stages.plan, stages.evaluate, stages.derive,
        stages.score, stages.check, stages.analyze,
    ):  # fmt: skip
        stage(run)


def documents(study: Study) -> None:
    study.changes += [("evaluation = 2", "evaluation = 3"), ("\ndocuments = 2", "\ndocuments = 3")]
    finish(study.run())


def replicates(study: Study) -> None:
    study.changes += [("\nreplicates = 2", "\nreplicates = 3")]
    finish(study.run())


def action(study: Study) -> None:
    """An action that a plan made anew names."""
    study.changes += [
        ("[plan]", '[[actions]]\nname = "snapkv-72"\nselector = "snapkv"\nkeep = 30\nwindow = 8\n\n[plan]')
    ]
    finish(study.run(replan=True))


def corrected_answer(study: Study) -> None:
    study.rows = [row | {"answers": ["k00", "k05"]} for row in study.rows]
    finish(study.run())


def redo(study: Study) -> None:
    finish(study.run(), "recent-half")


def killed_run(study: Study) -> None:
    """More replicates; the first run is killed after one document, and the next one goes on."""
    study.changes[study.changes.index(("\nreplicates = 2", "\nreplicates = 3"))] = (
        "\nreplicates = 2",
        "\nreplicates = 4",
    )
    process = start_process(die_after_a_document, study)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    finish(study.run())


def die_after_a_document(study: Study) -> None:
    run = study.run(limit=1)
    stages.prepare(run)
    stages.plan(run)
    stages.evaluate(run)
    os.kill(os.getpid(), signal.SIGKILL)


def reordered_source(study: Study) -> None:
    study.rows = study.rows[::-1]
    finish(study.run())


NIGHTS: list[Callable[[Study], None]] = [
    documents,
    replicates,
    action,
    corrected_answer,
    redo,
    killed_run,
    reordered_source,
]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """The study before its first night, finished."""
    first = Study(tmp_path / "grown", [row | {"answers": ["k00 k01"]} for row in prompts(16)])
    finish(first.run())
    return first


@pytest.mark.slow
def test_after_each_of_seven_nights_every_view_is_that_of_a_store_made_at_once(study: Study, tmp_path: Path) -> None:
    for number, night in enumerate(NIGHTS):
        night(study)
        assert differences(study, tmp_path / f"fresh-{number}") == [], night.__name__


def differences(study: Study, fresh: Path) -> list[str]:
    """Return a line for each view in which the grown store differs from a store made at once."""
    assert check_agrees(study.run()) == []
    ours, theirs = shown(study.run()), shown(study.made_at_once(fresh))
    assert ours.keys() == theirs.keys()
    assert all(ours[view] for view in ("events", "moments", "decomposition", "estimates", "answers"))
    return [line for view in ours if (line := difference(ours[view], theirs[view], view))]


Row = tuple[tuple[tuple[str, str], ...], dict[str, float]]


def shown(run: StudyRun) -> dict[str, list[Row]]:
    """Return the sorted rows of every view of the catalogue: values that must be equal as text, and summed numbers."""
    with kvdrift.open(run.location) as views:
        names = [
            name
            for (name,) in views.sql(
                "select view_name from duckdb_views() where schema_name = 'main' and not internal"
            ).fetchall()
        ]
        tables = {name: views.sql(f'from "{name}"').to_arrow_table() for name in names if name not in OF_THE_HISTORY}
    return {name: sorted(map(parted, table.to_pylist()), key=order) for name, table in tables.items()}


def parted(row: dict[str, Any]) -> Row:
    kept = {name: value for name, value in row.items() if name not in OF_THE_RUN}
    floats = {name: value for name, value in kept.items() if isinstance(value, float)}
    return tuple((name, str(value)) for name, value in kept.items() if name not in floats), floats


def order(row: Row) -> tuple[Any, ...]:
    return row[0], tuple(round(value, 6) for value in row[1].values())


def difference(ours: list[Row], theirs: list[Row], view: str) -> str:
    """Return how a view differs in the two stores; empty if it does not."""
    if len(ours) != len(theirs):
        return f"{view}: {len(ours)} rows, {len(theirs)} at once"
    for one, other in zip(ours, theirs, strict=True):
        if one[0] != other[0] or one[1] != pytest.approx(other[1], rel=TOLERANCE, abs=TOLERANCE, nan_ok=True):
            unlike = [
                (name, value, other[1].get(name)) for name, value in one[1].items() if value != other[1].get(name)
            ]
            return f"{view}: {set(one[0]) ^ set(other[0])} {unlike}"
    return ""
