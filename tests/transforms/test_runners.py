"""The pipeline on runners in other processes: Dask's workers, and the portable job service with external workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.dask.dask_runner import DaskRunner
from fixtures.beam_results import HORIZON, assert_equals_batch_path, events, ran, shuffled
from fixtures.command import call, mistake
from fixtures.dask_cluster import DaskCluster
from fixtures.finite_study import write_finite_study
from fixtures.job_service import JobService
from fixtures.refusals import refused
from fixtures.small_study import run_of
from fixtures.study_files import load_study

from kvdrift.flows.run import stages
from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.transforms import DeriveTrajectories, pipeline
from kvdrift.transforms.derivation import derive_trajectories
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import COVERED


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run = run_of(load_study(write_finite_study(folder)), folder / "store")
    stages.prepare(run)
    stages.develop(run)
    return folder / "store"


@pytest.fixture
def store(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Eight units that are not derived, in segments of two."""
    store = Store.open(shutil.copytree(made, tmp_path / "store"))
    monkeypatch.setattr(pipeline, "SEGMENT_ROWS", 2 * store.read("units")["event_rows"][0].as_py())
    return store


@pytest.fixture(scope="module")
def job_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    service = JobService(tmp_path_factory.mktemp("jobs"))
    yield service
    service.close()


@pytest.fixture(scope="module")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    """Two workers, one of several threads."""
    cluster = DaskCluster(tmp_path_factory.mktemp("dask"))
    cluster.add_worker()
    cluster.add_worker(threads=2)
    yield cluster
    cluster.close()


def assert_derived_once(store: Store) -> None:
    expected = derive_trajectories(store.read("events"))
    for table, rows in (("trajectories", expected.trajectories), ("steps", expected.steps)):
        keys = [(name, "ascending") for name in rows.column_names]
        assert store.read(table).sort_by(keys).equals(rows.sort_by(keys)), table
    assert store.covered_version("steps", COVERED) == store.version("events")


def test_derive_on_a_cluster(store: Store, dask_cluster: DaskCluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "derive", store.location, "--cluster", dask_cluster.address)
    assert code == 0, err
    assert "derived 8 units" in out
    assert err.count("\n") == 1
    assert f"cluster {dask_cluster.address}: 2 workers" in err
    assert_derived_once(store)


def test_a_runner_that_loses_a_bundle_is_an_error(store: Store, dask_cluster: DaskCluster) -> None:
    """The runner reports success; the returned segments are derived, and the next derivation does the others."""
    options = [f"--dask_client_address={dask_cluster.address}", "--dask_partition_size=1"]
    with pytest.raises(OperationError, match="was given 4 segments and returned 3; run the derivation again"):
        run_derivation(store.location, "fixtures.dropping_runner.DroppingRunner", options)
    assert store.covered_version("steps", COVERED) is None
    left = store.all_underived().size
    assert run_derivation(store.location).units == left > 0
    assert_derived_once(store)


def test_the_portable_job_service_with_external_workers(
    store: Store, job_service: JobService, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of the portable API with workers already running, as Flink and Spark get it."""
    options = [word for option in job_service.options for word in ("--runner-option", option)]
    code, out, err = call(capsys, "derive", store.location, "--runner", "PortableRunner", *options)
    assert (code, err) == (0, "")
    assert "derived 8 units" in out
    assert_derived_once(store)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--cluster", "local:2", "--runner", "FlinkRunner"), "--cluster local:2: derives with Beam's runner for Dask, not FlinkRunner"),
        (("--cluster", "local:2", "--watch"), "--watch: derives in this process"),
        (("--runner", "FlinkRunner", "--watch"), "--watch: derives in this process"),
        (("--runner-option", "flink_master=here"), "--runner-option flink_master=here: is an option of a runner; add --runner"),
        (("--cluster", "here"), "--cluster 'here': write tcp://HOST:PORT"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(
    options: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in mistake(capsys, "derive", tmp_path, *options)


def test_a_stream_on_dask_and_through_the_portable_job_service(
    dask_cluster: DaskCluster, job_service: JobService, tmp_path: Path
) -> None:
    """Dask's runner has no state and loses the results of a bundle's end; the portable way is that of Flink and Spark."""
    whole = events()
    stream = shuffled(whole, doubled=0.05)
    batches = [stream.slice(first, 40).combine_chunks() for first in range(0, stream.num_rows, 40)]

    def derive(*, grouped: bool) -> Callable[[Any], Any]:
        return lambda pipeline: pipeline | beam.Create(batches) | DeriveTrajectories(HORIZON, grouped=grouped)

    address = f"--dask_client_address={dask_cluster.address}"
    assert_equals_batch_path(ran(derive(grouped=True), tmp_path / "dask", DaskRunner(), [address]), whole)
    line = refused(ran, derive(grouped=False), tmp_path / "stateful", DaskRunner(), [address])
    assert "DaskRunner" in line
    assert "grouped=True" in line
    portable = ran(derive(grouped=False), tmp_path / "portable", "PortableRunner", job_service.options)
    assert_equals_batch_path(portable, whole)
