"""A run over a damaged store ends with the rows of an undamaged run, or with one line; ``make faults`` counts both."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from faults.disk.laws import write_laws
from faults.outcomes import MENDED, REFUSED, SURVIVED, tell
from faults.test_lost_logs import DAMAGE
from fixtures.small_study import finish, run_of
from fixtures.stored_rows import assert_alike, unmeasured
from fixtures.study_files import load_study

from kvdrift.log.store import Store
from kvdrift.schema.errors import KvdriftError
from kvdrift.schema.tables import TABLES
from kvdrift.verification.repair import repair

RANDOM_STATES = 25

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of both estimators."""
    folder = tmp_path_factory.mktemp("laws")
    finish(run_of(load_study(write_laws(folder)), folder / "store"))
    return folder


def outcome(whole: Path, damaged: Path) -> str:
    """Return the outcome of a run over a damaged store, with repair and another run if the store is refused."""
    lines: list[str] = []

    def ends() -> bool:
        try:
            finish(run_of(load_study(whole / "laws.toml"), damaged))
        except KvdriftError as error:
            lines.append(str(error))
            return False
        assert_alike(unmeasured(damaged), unmeasured(whole / "store"))
        return True

    if ends():
        return SURVIVED
    lines += repair(Store(damaged))
    mended = ends()
    assert not any("\n" in line for line in lines)
    return MENDED if mended else REFUSED


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


def test_the_newest_log_file_of_any_table(whole: Path, tmp_path: Path) -> None:
    cases = [(table, kind) for table in TABLES for kind in ("lost", *DAMAGE)]
    found = tried(whole, tmp_path, [lambda store, t=t, k=k: spoil(logs(store, t)[-1], k) for t, k in cases])
    tell("the newest log file of each table lost, empty, torn, torn at a line, zeroed; then `run`", found.elements())
    assert set(found) == {SURVIVED, MENDED}


def test_random_sets_of_log_files_and_data_files(whole: Path, tmp_path: Path) -> None:
    """If log and data of a table that others rely on are both lost, the store stays refused."""

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
    tell(
        "random sets of tables with damaged or lost log files, some with a lost data file; then `run`", found.elements()
    )
