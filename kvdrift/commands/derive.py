"""``kvdrift derive``: trajectories and steps of what was generated, once or watching."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import StoreArgument

if TYPE_CHECKING:
    from schema.store.store import Store
    from transforms.segments import DerivationReport

_CATALOG_SHARE = 9  # how much longer than its last writing the catalogue is left alone while batches come


def derive(
    store: StoreArgument,
    runner: Annotated[str, typer.Option("--runner", help="Beam runner: FnApiRunner, DaskRunner, …")] = "FnApiRunner",
    watch: Annotated[bool, typer.Option("--watch", help="Go on deriving as events arrive, until interrupted.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between looks with --watch.")] = 0.2,
) -> None:
    """Derive trajectories and steps of all events that lack them."""
    typer.echo(_watching(store, interval) if watch else _once(store, runner))


def _once(location: str, runner: str) -> str:
    from schema.store.store import Store
    from sql.catalog import refresh_catalog
    from sql.materialization import materialize_moments
    from transforms.pipeline import run_derivation

    report, store = run_derivation(location, runner=runner), Store.open(location)
    materialize_moments(store)
    refresh_catalog(store)
    if not report.segments:
        return f"nothing to derive: events version {report.events_version} is covered"
    rate = report.events / max(report.seconds, 1e-9)
    return (
        f"derived {_counts(report)} "
        f"in {report.seconds:.1f} s ({rate:,.0f} events/s); events version {report.events_version} is covered"
    )


def _watching(location: str, interval: float) -> str:
    from schema.store.store import Store
    from sql.materialization import LEAST_STEPS, materialize_moments
    from transforms.watch import watch

    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopped.append(received))

    store = Store.open(location)
    waiting = 0
    catalog = _Catalog(store)

    def batch_done(batch: DerivationReport) -> None:
        nonlocal waiting
        waiting += batch.events
        if waiting >= LEAST_STEPS and materialize_moments(store):
            waiting = 0
        catalog.batch_done()
        typer.echo(f"derived {batch.segments} segments, {batch.events} events in {batch.seconds:.2f} s", err=True)
        for failure in batch.failures:
            typer.echo(f"kvdrift: {failure}", err=True)

    total = watch(location, interval, lambda: bool(stopped), batch_done, catalog.write_if_due)
    catalog.write()
    return f"derived {_counts(total)}"


class _Catalog:
    """The catalogue of a store that is derived live; its writing takes a small part of the time alone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._behind = False
        self._written = self._cost = 0.0  # when it was written, and what that took, in seconds

    def batch_done(self) -> None:
        """Take note of new rows, and write it unless that was done just now."""
        self._behind = True
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write it if it lacks rows, unless it was written just now."""
        if time.perf_counter() - self._written >= _CATALOG_SHARE * self._cost:
            self.write()

    def write(self) -> None:
        """Write it if it lacks rows."""
        from sql.catalog import refresh_catalog

        if self._behind:
            begun = time.perf_counter()
            refresh_catalog(self._store)
            self._behind, self._written = False, time.perf_counter()
            self._cost = self._written - begun


def _counts(report: DerivationReport) -> str:
    branchings = f", {report.branchings} residual branchings" if report.branchings else ""
    return f"{report.segments} segments, {report.trajectories} trajectories{branchings}, {report.events} events"
