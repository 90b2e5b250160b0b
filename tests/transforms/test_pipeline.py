"""The derivation pipeline and its live form on real stores: exactly once, whatever is killed, broken or repeated."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fixtures.processes import forked
from fixtures.random_units import branched_unit, unit

from kvdrift.log.store import Store
from kvdrift.log.units.unit import NUMBERED
from kvdrift.schema.columns import Table
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.locking import TEMPORARY
from kvdrift.schema.tables import BRANCHING_DEPTHS, BRANCHINGS, EVENTS, STEPS, TABLES, TRAJECTORIES
from kvdrift.transforms import pipeline, segments
from kvdrift.transforms.compaction import Gathering
from kvdrift.transforms.derivation import derive_trajectories
from kvdrift.transforms.pipeline import read_records, record_folder, run_derivation, write_record
from kvdrift.transforms.residual_branches import derive_branchings
from kvdrift.transforms.watch import watch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
UNITS = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store.create(tmp_path_factory.mktemp("made") / "store")
    for number in range(UNITS):
        store.append_units([unit(number)])
    return Path(store.location)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    """A store of ``UNITS`` units, each in a file of its own, to be derived."""
    return Store.open(shutil.copytree(made, tmp_path / "store"))


def derived_rows(store: Store, table: Table) -> pa.Table:
    return store.read(table.name).sort_by([(name, "ascending") for name in table.key])


def assert_derived_once(store: Store) -> None:
    """Assert that the derived tables equal those of the whole log derived at once, with no segment left to derive."""
    events = store.read("events")
    coupled = pc.equal(events.column("kind"), "coupled")
    whole, branched = derive_trajectories(events.filter(coupled)), derive_branchings(events.filter(pc.invert(coupled)))
    assert derived_rows(store, TRAJECTORIES).equals(whole.trajectories)
    assert derived_rows(store, STEPS).equals(whole.steps)
    assert derived_rows(store, BRANCHINGS).equals(branched.branchings)
    assert derived_rows(store, BRANCHING_DEPTHS).equals(branched.depths)
    assert store.all_underived().size == 0


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_end_to_end_and_incrementally(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    report = run_derivation(store.location, progress=lambda done, todo: seen.append((done, todo)))
    assert (report.units, report.events, report.trajectories) == (UNITS, UNITS * 30, UNITS * 3)
    assert report.events_version == store.version("events")
    assert seen == [(UNITS, UNITS)]
    assert_derived_once(store)
    assert not list(Path(store.location).glob(f"{TEMPORARY}*"))

    monkeypatch.delattr(pipeline, "_beam")  # few segments are derived without it
    store.append_units([unit(number, first=3, replicates=2, horizon=10) for number in range(7)])
    report = run_derivation(store.location)
    assert (report.units, report.events, report.trajectories) == (7, 7 * 20, 7 * 2)
    assert_derived_once(store)
    for table in ("unit_moments", "trajectories", "steps"):
        assert store.covered_version(table, segments.COVERED) == store.version("events")


def test_both_estimators_go_one_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    branched = [branched_unit(number) for number in range(0, UNITS, 2)]
    store.append_units(branched)
    monkeypatch.setattr(pipeline, "SEGMENTS_PER_RUN", 8)
    monkeypatch.setattr(pipeline, "SEGMENT_ROWS", 120)
    report = run_derivation(store.location)
    assert (report.units, report.trajectories, report.branchings) == (UNITS + 10, UNITS * 3, 10 * 3)
    assert report.events == UNITS * 30 + sum(unit.events.num_rows for unit in branched)
    assert_derived_once(store)
    assert run_derivation(store.location).units == 0

    store.append_units([branched_unit(number) for number in range(1, 6, 2)])
    report = run_derivation(store.location)
    assert (report.units, report.trajectories, report.branchings) == (3, 0, 9)
    assert_derived_once(store)


def test_batches_are_bounded_and_only_the_last_one_covers(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beam, which derives several segments, prints nothing and leaves logging alone."""
    monkeypatch.setattr(pipeline, "SEGMENTS_PER_RUN", 8)
    monkeypatch.setattr(pipeline, "SEGMENT_ROWS", 30)
    seen: list[tuple[int, int]] = []
    covered: list[int | None] = []

    def progress(done: int, todo: int) -> None:
        seen.append((done, todo))
        covered.append(store.covered_version("steps", segments.COVERED))

    root = logging.getLogger()
    before = (root.level, [*root.handlers], root.manager.disable)
    assert run_derivation(store.location, progress=progress).units == UNITS
    assert (root.level, [*root.handlers], root.manager.disable) == before
    assert capfd.readouterr() == ("", "")
    assert seen == [(8, UNITS), (16, UNITS), (UNITS, UNITS)]
    assert covered == [None, None, store.version("events")]
    assert_derived_once(store)


def test_only_tables_with_rows_of_units_are_opened(store: Store) -> None:
    """Damage to a table that a derivation does not need does not stop the derivation; ``verify`` names the damage."""
    for table in sorted({*TABLES} - {*NUMBERED, "units", "studies"}):
        (Path(store.location) / table / "_delta_log" / f"{0:020}.json").write_text("damaged")
    assert run_derivation(store.location).units == UNITS
    assert_derived_once(store)


def test_a_run_prints_nothing_and_leaves_logging_alone(store: Store, made: Path, tmp_path: Path) -> None:
    """And where there is nothing to do, this is said without Beam."""
    other = Store.open(shutil.copytree(made, tmp_path / "other"))
    derived = run_derivation(store.location).units
    versions = store.versions()
    done = python(
        """
        import logging, sys
        from kvdrift.transforms.pipeline import run_derivation
        root = logging.getLogger()
        before = (root.level, list(root.handlers), root.manager.disable)
        report = run_derivation(sys.argv[1])
        assert (report.units, report.events, report.trajectories) == (0, 0, 0), report
        assert report.seconds < 2, report
        assert not [name for name in sys.modules if name.startswith("apache_beam")]
        assert run_derivation(sys.argv[2]).units == int(sys.argv[3])
        assert (root.level, list(root.handlers), root.manager.disable) == before == (logging.WARNING, [], 0)
        """,
        store.location, other.location, str(derived),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.versions() == versions
    assert_derived_once(other)


def derive_and_die(location: str, method: str, moment: int) -> None:
    """Run a derivation whose process is killed at the given call of a method of the store."""
    original, calls = getattr(Store, method), itertools.count(1)

    def dying(*arguments: Any, **options: Any) -> Any:
        if next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(Store, method, dying)
    run_derivation(location)


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        ("put_derived", 2),  # between a segment's files
        ("commit_derived", 1),  # all files written, none visible
        ("commit_derived", 2),  # moments visible, trajectories not
        ("commit_derived", 3),  # trajectories visible, steps not
    ],
)
@pytest.mark.by_default("commit_derived-3")
def test_kill_9_is_repaired_by_a_rerun(store: Store, method: str, moment: int) -> None:
    killed = forked().Process(target=derive_and_die, args=(store.location, method, moment))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    visible = set(store.paths("trajectories"))
    assert bool(visible) == ((method, moment) == ("commit_derived", 3))
    assert run_derivation(store.location).units == UNITS
    assert_derived_once(store)
    assert set(store.paths("trajectories")) >= visible, "what is there is not derived again"
    assert run_derivation(store.location).units == 0


def test_records_of_a_killed_run_are_swept_up_and_no_others(store: Store) -> None:
    written = segments.SegmentOutcome(7, events=3, errors=("a line",))
    left = Path(store.location, f"{TEMPORARY}killed")
    left.mkdir()
    with record_folder(store.location) as folder:
        assert not left.exists()
        write_record((0, [written]), folder)
        with record_folder(store.location):
            pass
        assert read_records(folder) == [written]
    assert [*Path(store.location).glob(f"{TEMPORARY}*")] == []


def damage(store: Store) -> dict[Path, bytes]:
    """Break three events files in different ways; returns their right content."""
    files = [Path(file) for file in store.files("events")]
    right = {file: file.read_bytes() for file in (files[3], files[9], files[15])}
    content = bytearray(right[files[3]])
    content[40] ^= 0xFF  # inside the first page: only its checksum tells
    files[3].write_bytes(bytes(content))
    files[9].write_bytes(b"not Parquet")
    pq.write_table(pq.read_table(files[15]).drop_columns(["delta"]), files[15])
    return right


def test_bad_files_are_named_in_one_line_and_the_others_derived(store: Store) -> None:
    right = damage(store)
    with pytest.raises(OperationError, match=rf"not all units could be derived \({UNITS - 3} were\)") as error:
        run_derivation(store.location)
    assert "\n" not in str(error.value)
    assert all(Path(file).name in str(error.value) for file in right)
    assert store.read("trajectories").num_rows == (UNITS - 3) * 3
    assert store.covered_version("steps", segments.COVERED) is None
    for file, content in right.items():
        file.write_bytes(content)
    assert run_derivation(store.location).units == 3
    assert_derived_once(store)


def test_many_bad_files_are_counted_not_listed(store: Store) -> None:
    for file in store.files("events"):
        Path(file).unlink()
    with pytest.raises(OperationError, match=r"\(0 were\).*; and 17 more") as error:
        run_derivation(store.location)
    assert str(error.value).count(".parquet") < 10


def test_segments_lost_by_a_runner_are_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SEGMENT_ROWS", 30)
    monkeypatch.setattr(pipeline, "read_records", lambda folder: read_records(folder)[:-1])
    with pytest.raises(OperationError, match="given 20 segments and returned 19"):
        run_derivation(store.location)
    monkeypatch.undo()
    assert run_derivation(store.location).units == 1
    assert_derived_once(store)


def test_a_failing_runner_is_one_line(store: Store, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(pipeline, "SEGMENT_ROWS", 30)

    def broken(_group: Any, _folder: str) -> None:
        raise KeyError("no place left")

    monkeypatch.setattr(pipeline, "write_record", broken)
    with pytest.raises(OperationError, match=r"FnApiRunner failed: .*no place left") as error:
        run_derivation(store.location)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_wrong_places_and_runners(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError):
        run_derivation(tmp_path / "nowhere")
    monkeypatch.setattr(pipeline, "SEGMENT_ROWS", 30)
    with pytest.raises(InputError, match="runner 'Fnord'"):
        run_derivation(store.location, runner="Fnord")
    assert not list(Path(store.location).glob(f"{TEMPORARY}*"))


def test_dask_runner_says_what_it_needs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"needs Dask: pip install 'kvdrift\[distributed\]'"):
        run_derivation(store.location, runner="DaskRunner")


class Watching:
    """A watch in a thread of its own, with the micro-batch reports that it gave."""

    def __init__(self, location: str) -> None:
        self.reports: list[segments.DerivationReport] = []
        self.total: segments.DerivationReport | None = None
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(location,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch after the batch at hand."""
        self._stop.set()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def _run(self, location: str) -> None:
        try:
            self.total = watch(location, 0.02, self._stop.is_set, self.reports.append)
        except OperationError as error:
            self.error = error

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the watch did not get there"
            time.sleep(0.01)


def test_watch_derives_what_appears(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.transforms.watch.BATCH_EVENTS", 450)
    with Watching(store.location) as watching:
        for turn in range(1, 6):
            store.append_units([unit(number, first=3 * turn) for number in range(4)])
            watching.until(lambda turn=turn: store.row_count("steps") == 30 * (UNITS + 4 * turn))  # type: ignore[misc]
    assert_derived_once(store)
    assert watching.total is not None
    assert watching.total.units == UNITS + 20 == sum(report.units for report in watching.reports)
    assert watching.total.events == (UNITS + 20) * 30
    assert store.data_version("events") <= watching.total.events_version <= store.version("events")
    assert max(report.units for report in watching.reports) <= 15
    assert store.covered_version("steps", segments.COVERED) == store.data_version("events")


@pytest.mark.slow
def test_watch_leaves_few_files_however_many_come(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.transforms.watch.BATCH_EVENTS", 1)
    monkeypatch.setattr("kvdrift.transforms.compaction.BATCHES", 2)
    monkeypatch.setattr("kvdrift.transforms.compaction._TIMES", 2)
    store.append_units([branched_unit(number) for number in range(10)])
    for number in range(40):
        store.append_units([unit(number, first=3)])
    before = store.read("events").sort_by([(name, "ascending") for name in EVENTS.key])
    with Watching(store.location) as watching:
        watching.until(lambda: not store.all_underived().size)
    for table in ("events", "units", "trajectories", "steps"):
        assert len(store.paths(table)) <= 40, "70 units: at most 16 files of each size, and what came since"
    assert_derived_once(store)
    assert store.read("events").sort_by([(name, "ascending") for name in EVENTS.key]).equals(before)
    assert store.units().num_rows == 70


def test_what_a_watch_cannot_put_together_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.transforms.compaction.BATCHES", 1)
    with pytest.raises(OperationError) as error, Gathering(f"{store.location}/nowhere") as gathering:
        gathering.batch_done()
    assert str(error.value).startswith(f"small files cannot be merged: {store.location}/nowhere is not a kvdrift store")


def test_watch_beside_a_derivation_and_a_writer(store: Store) -> None:
    with Watching(store.location) as watching:
        for turn in range(1, 4):
            store.append_units([unit(number, first=3 * turn) for number in range(20)])
            run_derivation(store.location)
        watching.until(lambda: not store.all_underived().size)
    assert watching.error is None
    assert_derived_once(store)


def test_watch_goes_on_past_a_bad_file_and_tells_of_it(store: Store) -> None:
    right = damage(store)
    with Watching(store.location) as watching:
        watching.until(lambda: store.row_count("steps") == (UNITS - 3) * 30)
        store.append_units([unit(0, first=3)])
        watching.until(lambda: store.row_count("steps") == (UNITS - 2) * 30)
    assert sum(report.units for report in watching.reports) == UNITS - 2
    assert f"not all units could be derived ({UNITS - 2} were)" in str(watching.error)
    for file, content in right.items():
        file.write_bytes(content)
    assert watch(store.location, 0.0, iter([False, True]).__next__).units == 3
    assert_derived_once(store)


def test_watch_stops_at_once_when_asked_before_it_began(store: Store) -> None:
    assert watch(store.location, 60.0, lambda: True).units == 0
