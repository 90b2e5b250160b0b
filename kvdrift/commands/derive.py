"""``kvdrift derive``: trajectories and steps of what was generated, once or watching."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import StoreArgument

if TYPE_CHECKING:
    from transforms.segments import DerivationReport


def derive(
    store: StoreArgument,
    runner: Annotated[str, typer.Option("--runner", help="Beam runner: FnApiRunner, DaskRunner, …")] = "FnApiRunner",
    watch: Annotated[bool, typer.Option("--watch", help="Go on deriving as events arrive, until interrupted.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between looks with --watch.")] = 1.0,
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
    from sql.catalog import refresh_catalog
    from sql.materialization import LEAST_STEPS, materialize_moments
    from transforms.watch import watch

    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopped.append(received))

    waiting = 0

    def batch_done(batch: DerivationReport) -> None:
        nonlocal waiting
        store, waiting = Store.open(location), waiting + batch.events
        if waiting >= LEAST_STEPS and materialize_moments(store):
            waiting = 0
        refresh_catalog(store)
        typer.echo(f"derived {batch.segments} segments, {batch.events} events in {batch.seconds:.2f} s", err=True)
        for failure in batch.failures:
            typer.echo(f"kvdrift: {failure}", err=True)

    total = watch(location, interval, lambda: bool(stopped), batch_done)
    return f"derived {_counts(total)}"


def _counts(report: DerivationReport) -> str:
    branchings = f", {report.branchings} residual branchings" if report.branchings else ""
    return f"{report.segments} segments, {report.trajectories} trajectories{branchings}, {report.events} events"
