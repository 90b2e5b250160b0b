"""Derivation on a cluster, by Beam's runner for Dask."""

from __future__ import annotations

from kvdrift.flows.cluster.connection import Cluster
from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import DerivationReport, pending


def derive_on(cluster: Cluster, location: str) -> DerivationReport:
    """Derive every underived segment of a store, on a cluster's workers."""
    store = Store.open(location)
    if pending(store).segments:
        cluster.check(store, threads=None)
    try:
        address = cluster.scheduler
        with cluster.for_other_clients():
            return run_derivation(location, "DaskRunner", [f"--dask_client_address={address}"])
    except OperationError:
        if cluster.is_lost:  # the runner does not report lost work: it returns fewer segments than it was given
            raise cluster.lost() from None
        raise
