"""Only the command reaches the cluster that it starts: scheduler and workers run whatever code they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from distributed.comm import connect
from distributed.security import Security

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.flows.cluster.connection import Cluster


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
