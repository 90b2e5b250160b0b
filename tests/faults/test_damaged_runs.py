"""Runs over damaged stores: the rows of an undamaged run, or one line; ``make faults`` prints how often which."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from faults.test_lost_logs import DAMAGE
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study

from schema.errors import KvdriftError
from schema.store.store import Store
from schema.tables import TABLES
from verification.repair import repair

STUDY = """
[study]
name = "laws"
horizon = 4
seed = 3

[model]
id = "laws"
kind = "finite-state"
family = "mixture"
alphabet = 2

[[documents]]
source = "finite-state"
stratum = "all"
development = 2
evaluation = 2

[[actions]]
name = "mixture"

[plan]
baseline = "mixture"
primary = ["mismatch"]
replicates = 3
documents = 2
development_replicates = 2
draws = 100
exploratory_draws = 100
estimator = "swrb"
"""
# What differs between two runs: times, and versions and names of files that follow from them.
OF_THE_RUN = {
    "path", "prefill_seconds", "decode_seconds", "seconds", "frozen_at", "events_version", "plan_sha256", "inputs_sha256",
}  # fmt: skip
RANDOM_STATES = 25

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of both estimators."""
    folder = tmp_path_factory.mktemp("laws")
    (folder / "study.toml").write_text(STUDY)
    finish(run_of(load_study(folder / "study.toml"), folder / "store"))
    return folder


def rows(store: Path) -> dict[str, list[str]]:
    """All rows, each once where it was estimated again, without what is of the run."""
    found = {}
    for table in TABLES.keys() - {"document_moments"}:  # means that results are made from, at times in two parts
        stored = Store.open(store).read(table).to_pylist()
        texts = [json.dumps({name: row[name] for name in row if name not in OF_THE_RUN}, default=str) for row in stored]
        found[table] = sorted(set(texts) if table in {"results", "calibration"} else texts)
    return found


def outcome(whole: Path, damaged: Path) -> str:
    """What a run makes of a damaged store; and, where it refuses it, what it makes of it after repair."""

    def went(prefix: str) -> str:
        try:
            finish(run_of(load_study(whole / "study.toml"), damaged))
        except KvdriftError as error:
            line = str(error)
        else:
            assert rows(damaged) == rows(whole / "store")
            return f"{prefix}identical"
        assert "\n" not in line
        return f"{prefix}refused"

    first = went("")
    if first == "identical":
        return first
    assert all("\n" not in line for line in repair(Store(damaged)))
    return went("refused, then ")


def tried(whole: Path, folder: Path, damages: Iterable[Callable[[Path], None]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for damage in damages:
        store = Path(shutil.copytree(whole / "store", folder / "store"))
        damage(store)
        found[outcome(whole, store)] += 1
        shutil.rmtree(store)
    return found


def spoil(log: Path, kind: str) -> None:
    if kind == "lost":
        log.unlink()
    else:
        log.write_bytes(DAMAGE[kind](log.read_bytes()))


def logs(store: Path, table: str) -> list[Path]:
    return sorted((store / table / "_delta_log").glob("*.json"))


def test_the_newest_log_file_of_any_table(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [(table, kind) for table in TABLES for kind in ("lost", *DAMAGE)]
    found = tried(whole, tmp_path, [lambda store, t=t, k=k: spoil(logs(store, t)[-1], k) for t, k in cases])
    with capsys.disabled():
        print(f"\nnewest log files: {len(cases)} states tried, {dict(found)}")  # noqa: T201
    assert set(found) == {"identical", "refused, then identical"}


def test_random_sets_of_log_files_and_data_files(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is lost for good, log and data of a table that others rely on, stays refused."""

    def damage(chance: random.Random) -> Callable[[Path], None]:
        def do(store: Path) -> None:
            for table in TABLES:
                if chance.random() < 0.25:
                    newest = logs(store, table)[-1]
                    spoil(newest if chance.random() < 0.7 else chance.choice(logs(store, table)), chance.choice(["lost", *DAMAGE]))  # fmt: skip
                    data = sorted((store / table).rglob("*.parquet"))
                    if data and chance.random() < 0.2:
                        chance.choice(data).unlink()

        return do

    found = tried(whole, tmp_path, [damage(random.Random(seed)) for seed in range(RANDOM_STATES)])  # noqa: S311
    with capsys.disabled():
        print(f"\nrandom sets: {RANDOM_STATES} states tried, {dict(found)}")  # noqa: T201
