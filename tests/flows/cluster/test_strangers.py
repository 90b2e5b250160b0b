"""Only the command reaches the cluster that it starts: scheduler and workers run whatever code they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from distributed.comm import connect
from distributed.security import Security
from fixtures.finite_study import write_finite_study
from fixtures.small_study import run_of
from fixtures.stored_rows import content
from fixtures.study_files import load_study

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.flows.cluster.connection import Cluster, derive_on
from kvdrift.flows.cluster.generator import ClusterGenerator
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterAddress.parse("local:1"), lambda _: None) as own:
        yield own


def addresses(cluster: Cluster) -> dict[str, str]:
    """Return the addresses of the scheduler, its worker, and the nanny that starts the worker."""
    ((address, worker),) = cluster.client.scheduler_info()["workers"].items()
    return {"scheduler": cluster.scheduler, "worker": address, "nanny": worker["nanny"]}


async def answer(address: str, security: Security) -> object:
    """Return the answer of a cluster's process to a stranger's question about it."""
    comm = await connect(address, timeout=2, **security.get_connection_args("client"))
    try:
        await comm.write({"op": "identity", "reply": True})
        return await comm.read()
    finally:
        await comm.close()


@pytest.mark.parametrize("part", ["scheduler", "worker", "nanny"])
def test_another_process_of_the_machine_cannot_connect(cluster: Cluster, part: str) -> None:
    """Neither unencrypted, nor with a certificate that it made itself."""
    _, _, place = addresses(cluster)[part].partition("://")
    for scheme, security in (("tcp", Security()), ("tls", Security.temporary())):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds, all of connections
            asyncio.run(answer(f"{scheme}://{place}", security))


@pytest.mark.slow
def test_the_command_generates_and_derives_there(cluster: Cluster, tmp_path: Path) -> None:
    """Beam's runner for Dask makes a connection of its own."""
    file = write_finite_study(tmp_path)
    there = ClusterGenerator(cluster)
    run = StudyRun(
        load_study(file), str(tmp_path / "there"), there, identify=there.identify,
        derived_by=partial(derive_on, cluster),
    )  # fmt: skip
    for one in (run, run_of(load_study(file), tmp_path / "here")):
        stages.prepare(one)
        stages.develop(one)
        stages.derive(one)
    for table in ("events", "trajectories", "steps"):
        assert content(tmp_path / "there", table).equals(content(tmp_path / "here", table)), table
