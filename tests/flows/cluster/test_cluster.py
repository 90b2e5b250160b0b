"""Studies on a Dask cluster: the events of one process, whatever is killed, and workers that do not fit are refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import mistake
from fixtures.dask_cluster import DaskCluster, run_on, wait_for
from fixtures.finite_study import write_finite_study
from fixtures.processes import forked
from fixtures.small_study import TEXT, evaluate, run_of, write_study
from fixtures.stored_rows import assert_same, content
from fixtures.study_files import load_study

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.flows.cluster.connection import ONE_GPU, Cluster
from kvdrift.flows.cluster.generator import ClusterGenerator
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.actions import build_actions
from kvdrift.generator.identity import ModelIdentity
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.transforms.pipeline import run_derivation


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the study, evaluated in this process."""
    folder = tmp_path_factory.mktemp("here")
    evaluate(run_of(load_study(write_finite_study(folder)), folder / "store"))
    return folder / "store"


@pytest.fixture
def dask_cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    """A scheduler of the test's own."""
    cluster = DaskCluster(tmp_path)
    yield cluster
    cluster.close()


def run_in(folder: Path, address: str) -> AbstractContextManager[StudyRun]:
    """A run of the study on a cluster, with its store in a folder."""
    return run_on(address, write_finite_study(folder), folder / "store")


class Background:
    """A stage in a thread."""

    def __init__(self, stage: Callable[[StudyRun], Any], run: StudyRun) -> None:
        self._stage, self._run = stage, run
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._stage(self._run)
        except Exception as error:  # noqa: BLE001 - raised again by ``end``
            self.error = error

    def end(self) -> None:
        """Wait for the end of the run, and raise its error."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.slow
def test_workers_killed_in_generation_and_in_derivation_change_nothing(
    dask_cluster: DaskCluster, tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are of two documents."""
    monkeypatch.setattr("kvdrift.flows.cluster.worker.GUESS", 0.0)
    monkeypatch.setattr("kvdrift.transforms.pipeline.SEGMENT_ROWS", 1)
    dask_cluster.add_worker()
    one = dask_cluster.add_worker("before its units are stored")
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        developing = Background(stages.develop, run)
        one.wait_until_it_halts()
        one.kill()
        developing.end()
        other = dask_cluster.add_worker("in a derivation")
        deriving = Background(stages.derive, run)
        other.wait_until_it_halts()
        other.kill()
        deriving.end()
        stages.plan(run)
        third = dask_cluster.add_worker("after its units are stored")
        evaluating = Background(stages.evaluate, run)
        third.wait_until_it_halts()
        third.kill()
        evaluating.end()
        stages.derive(run)
    assert_same(tmp_path / "store", here)


@pytest.mark.slow
def test_a_document_that_fails_takes_no_other_along(
    dask_cluster: DaskCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.flows.cluster.worker.GUESS", 0.0)
    dask_cluster.add_worker(faulty="development-2")
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        with pytest.raises(OperationError, match=r"document 'development-2': worker .* failed: RuntimeError: faulty"):
            stages.develop(run)
        stored = sorted(unit["doc"] for unit in run.store.units(columns=["doc"]).to_pylist())
        assert stored == sorted(["development-1", "development-3", "development-4"] * 2)


@pytest.mark.slow
def test_a_scheduler_that_is_killed_costs_nothing_that_was_stored(
    dask_cluster: DaskCluster, tmp_path: Path, here: Path
) -> None:
    worker = dask_cluster.add_worker("after its units are stored")
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        developing = Background(stages.develop, run)
        worker.wait_until_it_halts()
        dask_cluster.scheduler.kill()
        with pytest.raises(OperationError, match=r"^cluster tcp://127.0.0.1:\d+: the scheduler"):
            developing.end()
        stored = {unit["doc"] for unit in run.store.units(columns=["doc"]).to_pylist()}
        assert len(stored) == 1
    dask_cluster.close()
    (tmp_path / "again").mkdir()
    again = DaskCluster(tmp_path / "again")
    try:
        again.add_worker()
        with run_in(tmp_path, again.address) as run:
            evaluate(run)
    finally:
        again.close()
    assert_same(tmp_path / "store", here)


def develop(address: str, folder: Path) -> None:
    with run_in(folder, address) as run:
        stages.prepare(run)
        stages.develop(run)


@pytest.mark.slow
def test_a_driver_that_is_killed_is_gone_on_from(dask_cluster: DaskCluster, tmp_path: Path, here: Path) -> None:
    worker = dask_cluster.add_worker("before its units are stored")
    driver = forked().Process(target=develop, args=(dask_cluster.address, tmp_path))
    driver.start()
    worker.wait_until_it_halts()
    driver.kill()
    driver.join()
    worker.let_go()  # what it has begun it stores, though nobody waits for it
    store = Store.open(tmp_path / "store")
    wait_for(lambda: len(store.units()) == 2)
    with run_in(tmp_path, dask_cluster.address) as run:
        evaluate(run)
    assert_same(tmp_path / "store", here)


@pytest.mark.slow
def test_a_sick_worker_takes_nobody_elses_work_with_it(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    """The sick worker fails at once, so Dask gives it a document again while the sound worker is busy."""
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        well = dask_cluster.add_worker("before its units are stored")
        sick = dask_cluster.add_worker(sick=True)
        developing = Background(stages.develop, run)
        well.wait_until_it_halts()
        sick.wait_until_it_gets_a_document_again()
        well.let_go()
        developing.end()
        assert len(run.store.units()) == 8
    well.kill()
    (tmp_path / "other").mkdir()
    with run_in(tmp_path / "other", dask_cluster.address) as run:
        stages.prepare(run)
        with pytest.raises(OperationError, match=r"^worker tcp://127.0.0.1:\d+ on .*: RuntimeError: CU"):
            stages.develop(run)  # twice at the only one


def test_workers_that_do_not_fit_are_refused(
    dask_cluster: DaskCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.flows.cluster.connection._LOOK_SECONDS", 0.2)
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        assert run.derived_by(run.location).units == 0  # without a worker
        developing = Background(stages.develop, run)  # which waits for one
        lacking = dask_cluster.add_worker(lacking="kvdrift.flows.cluster.connection")
        with pytest.raises(InputError, match=r"worker tcp://127.0.0.1:\d+: lacks this kvdrift "):
            developing.end()
        lacking.kill()
        dask_cluster.add_worker(threads=2)
        with pytest.raises(InputError, match=r"worker tcp://127.0.0.1:\d+ on .*: has 2 threads, .* --nthreads 1"):
            stages.develop(run)
        stages.develop(run_of(run.study, run.location))
        assert run.derived_by(run.location).units == 8  # which takes any number


@pytest.mark.slow
def test_workers_that_declare_no_gpu_get_no_work_of_a_gpu(
    dask_cluster: DaskCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such workers are not even asked whether they fit. The model computes on the CPU, and is taken for a model of a GPU."""
    monkeypatch.setattr("kvdrift.flows.cluster.generator.resources_of", lambda _: ONE_GPU)
    dask_cluster.add_worker(threads=2, sick=True)
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        assert isinstance(run.made_by, ClusterGenerator)
        said: list[str] = []
        monkeypatch.setattr(run.made_by.cluster, "say", said.append)
        with pytest.raises(InputError, match=r"^cluster .* --resources GPU=1$"):
            stages.develop(run)
        dask_cluster.add_worker(resources={"GPU": 1})
        stages.develop(run)
        assert len(run.store.units()) == 8
    _, line = said
    assert line.startswith("no GPU")
    assert line.endswith(": 1")


def said_and_link(address: str) -> tuple[list[str], str]:
    """What is said when a cluster is connected to, and Dask's link to its dashboard."""
    said: list[str] = []
    with Cluster(ClusterAddress.parse(address), said.append) as cluster:
        link = cluster.client.dashboard_link
    assert re.fullmatch(r"http://127.0.0.1:\d+/status", link)
    return said, link


@pytest.mark.slow
def test_no_address_of_a_dashboard_is_said_if_there_is_none(dask_cluster: DaskCluster) -> None:
    """Dask also has a link for a scheduler without bokeh."""
    dask_cluster.add_worker()
    said, _ = said_and_link(dask_cluster.address)
    assert said == [f"cluster {dask_cluster.address}: 1 worker"]


@pytest.mark.slow
def test_a_scheduler_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    cluster = DaskCluster(tmp_path, lacking="kvdrift.flows.cluster.connection")
    try:
        with run_in(tmp_path, cluster.address) as run:
            stages.prepare(run)
            with pytest.raises(InputError, match=r"^scheduler tcp://127.0.0.1:\d+: lacks this kvdrift "):
                stages.develop(run)
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_document_that_costs_every_worker_its_life_ends_the_run(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    """The run ends after as many dead workers as Dask's ``allowed-failures`` says."""
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        developing = Background(stages.develop, run)
        for _ in range(4):
            worker = dask_cluster.add_worker("before its units are stored")
            worker.wait_until_it_halts()
            worker.kill()
        with pytest.raises(OperationError, match=r"^cluster .*: 4 workers .*, the last one tcp"):
            developing.end()


@pytest.mark.slow
def test_a_scheduler_that_is_killed_in_a_derivation(dask_cluster: DaskCluster, tmp_path: Path) -> None:
    worker = dask_cluster.add_worker("in a derivation")
    with run_in(tmp_path, dask_cluster.address) as run:
        stages.prepare(run)
        stages.develop(run)
        deriving = Background(stages.derive, run)
        worker.wait_until_it_halts()
        dask_cluster.scheduler.kill()
        with pytest.raises(OperationError, match=r"^cluster tcp://127.0.0.1:\d+: the scheduler") as refused:
            deriving.end()
    assert "\n" not in str(refused.value)
    assert run_derivation(run.location).units == 8


def test_a_scheduler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrift.flows.cluster.connection.CONNECT_SECONDS", 0.5)
    with run_in(tmp_path, "tcp://127.0.0.1:9") as run:
        assert isinstance(run.made_by, ClusterGenerator)
        with pytest.raises(OperationError, match=r"^cluster tcp://127.0.0.1:9: no scheduler answers \("):
            run.made_by.check([])


def test_dask_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"^--cluster local:2: .*'kvdrift\[distributed\]'"):
        ClusterAddress.parse("local:2")


POLICY = '[[actions]]\nname = "tova-half"\npolicy = "tova"\nkeep = "1/2"\n'
FEWER = (
    (TEXT[TEXT.rindex("[[documents]]") : TEXT.index("[[actions]]")], ""),
    ("development_replicates = 4", "development_replicates = 2"),
)
CODED = (
    'name = "recent-half"\nselector = "recent"\nkeep = "1/2"\n',
    f'name = "coded"\ncodec = {{ name = "int4", group = 8, residual = 4, generated = true }}\n\n{POLICY}',
)


@pytest.fixture
def with_dashboard(tmp_path: Path) -> Iterator[DaskCluster]:
    """A scheduler with an application beside its own."""
    cluster = DaskCluster(tmp_path, dashboard=True)
    yield cluster
    cluster.close()


def test_a_worker_makes_what_this_process_does_and_knows_weights_that_are_not_here(
    with_dashboard: DaskCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actions include a codec that codes generated entries, and a policy. The dashboard's address is said."""
    file = write_study(tmp_path, ("horizon = 12", "horizon = 6"), *FEWER, CODED)
    study = load_study(file)
    (action,) = build_actions(study)[:1]
    expected = LocalGenerator().identify(study, required=True)(action)
    absent = ModelIdentity(None, expected.tokenizer_sha256)
    monkeypatch.setattr("kvdrift.flows.cluster.generator.model_files", lambda *_: absent)
    with_dashboard.add_worker()
    said, link = said_and_link(with_dashboard.address)
    assert said == [f"cluster {with_dashboard.address}: 1 worker; dashboard {link}"]
    with run_in(tmp_path, with_dashboard.address) as run:
        assert run.identify(study, required=False)(action).weights_sha256 is None
        assert run.identify(study, required=True)(action) == expected
    monkeypatch.undo()
    with run_on(with_dashboard.address, file, tmp_path / "there") as run:
        for one in (run, run_of(study, tmp_path / "here")):
            stages.prepare(one)
            stages.develop(one)
    for table in ("actions", "identities", "events"):
        assert content(tmp_path / "there", table).equals(content(tmp_path / "here", table)), table
    assert content(tmp_path / "there", "events")["action"].unique().to_pylist() == [
        "coded",
        "full",
        "snapkv-half",
        "tova-half",
    ]


@pytest.mark.parametrize("address", ["8786", "local:0", "local:", "http://there:8786", "tcp://there"])
def test_an_address_says_what_it_should_be(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "run", write_finite_study(tmp_path), "--cluster", address)
    assert f"--cluster '{address}': " in line
