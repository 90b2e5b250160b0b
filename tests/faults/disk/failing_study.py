"""A program that repeats each stage of a study while one change on the disk fails, and then without failures.

The program needs the library ``library.c`` preloaded. It imports everything first, and forks a process for each
run before any thread starts. Given only a folder, it runs the study stage by stage and keeps the store before each
stage. Given also a share, it makes this share of the trials and prints the outcome of each trial as a line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam.runners.portability.fn_api_runner
import torch
from faults.disk.failing import How, counted, fail
from faults.disk.trials import fault_of_end, in_a_process, say, ways
from faults.outcomes import MENDED, SURVIVED
from fixtures.finite_study import write_smallest_study
from fixtures.stored_rows import rows

import kvdrift.commands.run
import kvdrift.generator.generation
import kvdrift.report.page
from kvdrift.command import main
from kvdrift.flows.run import stages
from kvdrift.flows.run import study as study_flow
from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.schema.tables import TABLES
from kvdrift.sql import catalog_file
from kvdrift.transforms import pipeline
from kvdrift.verification.repair import repair

IMPORTED = (apache_beam, kvdrift)
Stage = Callable[[Any], object]
# What a run does, cut so that the run with a failing change and the run after it take little time. Each stage begins
# with what every run begins with.
STAGES: dict[str, tuple[Stage, ...]] = {
    "store": (),
    "development": (stages.develop,),
    "derivation": (lambda run: pipeline.run_derivation(run.location),),
    "catalogue": (lambda run: catalog_file.refresh_catalog(run.store),),
    "plan": (stages.plan,),
    "evaluation": (stages.evaluate,),
    "second derivation": (stages.derive, stages.check),
    "estimates": (stages.analyze,),
    "report": (stages.report,),
}
# Of these one trial in so many is enough: hundreds of writes of DuckDB to one file aside; and what was tried before.
SPARED = {"catalogue": 12, "second derivation": 100}
_UNIT = ("study", "model", "doc", "action", "estimator", "first_replicate", "replicates")


class Trials:
    """The trials of one study in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, folder / str(os.getpid())
        self._own.mkdir()
        self._study = write_smallest_study(folder)
        self._store, self._said = self._own / "store", self._own / "said"

    def prepare(self) -> None:
        """Run the study stage by stage; keep each stage's store of before, its rows of after, and its changes."""
        for stage in STAGES:
            if self._store.exists():
                shutil.copytree(self._store, self._folder / f"before {stage}")
            assert in_a_process(self._said, self._run, stage, How.COUNTED) == 0, self._said.read_text()
            assert in_a_process(self._said, self._keep_rows, stage) == 0, self._said.read_text()
        shutil.copytree(self._store, self._folder / "whole")

    def all(self) -> list[tuple[str, How, int]]:
        """List the trials: each change of each stage, with each way to fail."""
        found = []
        for stage in STAGES:
            every = ways((self._folder / f"{stage}.changes").read_text())
            found += [(stage, how, at) for how, at in every[:: SPARED.get(stage, 1)]]
        return found

    def tried(self, stage: str, how: How, at: int) -> dict[str, Any]:
        """Run a stage while one change fails, and then without failures."""
        shutil.rmtree(self._own)
        self._own.mkdir()
        if stage != "store":
            shutil.copytree(self._folder / f"before {stage}", self._store)
        code = in_a_process(self._said, self._run, stage, how, at)
        said = self._said.read_text(errors="replace")
        outcome = fault_of_end(how, code, said)
        if outcome is None:
            again = in_a_process(self._said, self._go_on, stage)
            outcome = (self._own / "outcome").read_text() if again == 0 else f"then {again}: {self._said.read_text()}"
        return {"stage": stage, "how": how.name, "change": at, "code": code, "outcome": outcome, "said": said[-400:]}

    def _run(self, stage: str, how: How, at: int = 0) -> None:
        """Do one stage of ``kvdrift run``; write down outside the store what is acknowledged."""
        self._only(stage)
        _keep(self._own / "ledger")
        fail(self._store, how, at, "" if stage == "catalogue" else ".temporary-")
        try:
            main(["run", str(self._study), "--store", str(self._store)])
        finally:
            if how is How.COUNTED:
                (self._folder / f"{stage}.changes").write_text(counted())

    def _keep_rows(self, stage: str) -> None:
        (self._folder / f"{stage}.rows").write_text(json.dumps(rows(self._store)))

    def _go_on(self, stage: str) -> None:
        """Check that nothing acknowledged is missing, and run the stage to its end, after a repair if asked for."""
        outcome = SURVIVED
        try:
            missing = _missing(self._store, self._own / "ledger")
            Store.create(self._store)
        except DamagedStoreError:
            outcome = MENDED
            list(repair(Store(self._store)))
            missing = _missing(self._store, self._own / "ledger")
        if not missing:
            self._only(stage)
            try:
                main(["run", str(self._study), "--store", str(self._store)])
            except SystemExit as end:
                if end.code:
                    raise
        wrong = missing or self._wrong(stage)
        (self._own / "outcome").write_text("; ".join(wrong) or outcome)

    def _wrong(self, stage: str) -> list[str]:
        """Return the differences from the store of a run without failures."""
        found, wrong = rows(self._store), []
        for table, own in json.loads((self._folder / f"{stage}.rows").read_text()).items():
            lost, more = Counter(own) - Counter(found[table]), Counter(found[table]) - Counter(own)
            if lost or more:
                doubled = not lost and all(row in own for row in more)
                wrong.append(f"{table}: {'doubled' if doubled else 'lost' if not more else 'wrong'}")
        if stage == "report":
            whole, here = (_files(store / "report") for store in (self._folder / "whole", self._store))
            wrong += [f"report: {path} is wrong" for path in whole if whole[path] != here.get(path)]
        return wrong

    @staticmethod
    def _only(stage: str) -> None:
        """Make ``kvdrift run`` do one stage."""

        def run_stage(runs: Any, _page: Any, *, plan_only: bool) -> study_flow.Outcome:  # noqa: ARG001
            for run in runs:
                for does in STAGES[stage]:
                    does(run)
            return study_flow.Outcome(runs[0].location, [], 0, did_something=True)

        study_flow._run = run_stage


def _keep(ledger: Path) -> None:
    """Write down everything that the store acknowledges: units, and rows of small tables."""

    def kept(method: Callable[..., int], told: Callable[..., tuple[str, list[Any]]]) -> Callable[..., int]:
        def call(store: Store, *given: Any) -> int:
            count = method(store, *given)
            with ledger.open("a") as lines:
                lines.write(json.dumps(told(*given), default=str) + "\n")
            return count

        return call

    def units(given: Any) -> tuple[str, list[Any]]:
        return "units", [{name: unit.record[name] for name in _UNIT} for unit in given]

    def keys(table: str, given: Any) -> tuple[str, list[Any]]:
        return table, given.select(list(TABLES[table].key)).to_pylist()

    Store.append_units = kept(Store.append_units, units)  # type: ignore[method-assign]
    Store.append_rows = kept(Store.append_rows, keys)  # type: ignore[method-assign]


def _missing(location: Path, ledger: Path) -> list[str]:
    """Return everything that was acknowledged and is missing."""
    told = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    if not told:
        return []
    store = Store.open(location)
    units = {json.dumps(row) for row in store.units().select(list(_UNIT)).to_pylist()}
    missing = []
    for table, wanted in told:
        if table == "units":
            there = units
        else:
            held = store.read(table, columns=list(TABLES[table].key)).to_pylist()
            there = {json.dumps(row, default=str) for row in held}
        missing += [f"{table}: lost {key}" for key in wanted if json.dumps(key) not in there]
    return missing


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    trials = Trials(Path(sys.argv[1]))
    if len(sys.argv) == 2:
        trials.prepare()
    else:
        share, shares, every = map(int, sys.argv[2:])
        for one in trials.all()[share::shares][::every]:
            say(trials.tried(*one))
