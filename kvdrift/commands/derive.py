"""``kvdrift derive``: once, or watching."""

from __future__ import annotations

import signal

import typer

from schema.store.store import Store
from sql.catalog import refresh_catalog
from transforms.pipeline import run_derivation
from transforms.segments import DerivationReport
from transforms.watch import watch


def derive_once(location: str, runner: str) -> str:
    """Derive what is left and refresh the catalogue; returns one line."""
    report = run_derivation(location, runner=runner)
    refresh_catalog(Store.open(location))
    if not report.segments:
        return f"nothing to derive: events version {report.events_version} is covered"
    rate = report.events / max(report.seconds, 1e-9)
    return (
        f"derived {_counts(report)} "
        f"in {report.seconds:.1f} s ({rate:,.0f} events/s); events version {report.events_version} is covered"
    )


def derive_watching(location: str, interval: float) -> str:
    """Derive as events arrive until interrupted or terminated; returns one line."""
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopped.append(received))

    def batch_done(batch: DerivationReport) -> None:
        refresh_catalog(Store.open(location))
        typer.echo(f"derived {batch.segments} segments, {batch.events} events in {batch.seconds:.2f} s", err=True)
        for failure in batch.failures:
            typer.echo(f"kvdrift: {failure}", err=True)

    total = watch(location, interval, lambda: bool(stopped), batch_done)
    return f"derived {_counts(total)}"


def _counts(report: DerivationReport) -> str:
    branchings = f", {report.branchings} residual branchings" if report.branchings else ""
    return f"{report.segments} segments, {report.trajectories} trajectories{branchings}, {report.events} events"
