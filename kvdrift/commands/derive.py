"""``kvdrift derive``: derive trajectories and steps from stored events, once or continuously."""

from __future__ import annotations

import gc
import signal
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import ClusterOption, NoCompactOption, StoreArgument
from kvdrift.schema.errors import InputError
from kvdrift.schema.process_memory import bound_memory, release_memory

if TYPE_CHECKING:
    from kvdrift.transforms.segments import DerivationReport


def derive(
    store: StoreArgument,
    runner: Annotated[
        str | None, typer.Option(metavar="NAME", help="The Beam runner, such as FlinkRunner; by default FnApiRunner.")
    ] = None,
    runner_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A Beam option for the runner, such as job_endpoint=HOST:PORT; repeat the option for several.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep deriving new events until interrupted.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two checks for new events with --watch.")
    ] = 0.2,
    no_compact: NoCompactOption = False,
) -> None:
    """Derive trajectories and steps of all events that lack them.

    Examples:
        kvdrift derive stores/quickstart
        kvdrift derive stores/quickstart --watch
    """
    if watch and (runner or cluster):
        raise InputError("--watch: derives in this process; leave --runner and --cluster out")
    if runner and cluster:
        raise InputError(f"--cluster {cluster}: derives with Beam's runner for Dask, not {runner}; give one of the two")
    if runner_option and not runner:
        raise InputError(f"--runner-option {runner_option[0]}: is an option of a runner; add --runner NAME")
    if watch:
        typer.echo(_watching(store, interval, compacts=not no_compact))
    else:
        report = _derive(store, runner or "FnApiRunner", runner_option or [], cluster)
        typer.echo(_done(store, report, compacts=not no_compact))


def _derive(location: str, runner: str, options: list[str], cluster: str | None) -> DerivationReport:
    if cluster is None:
        from kvdrift.console import ConsoleProgress

        with ConsoleProgress() as console:
            console.doing("deriving")
            from kvdrift.transforms.pipeline import run_derivation

            flags = [f"--{option.lstrip('-')}" for option in options]
            return run_derivation(location, runner, flags, console.derived)
    from kvdrift.flows.cluster.address import ClusterAddress
    from kvdrift.flows.cluster.connection import Cluster, derive_on

    with Cluster(ClusterAddress.parse(cluster), partial(typer.echo, err=True)) as connection:
        return derive_on(connection, location)


def _done(location: str, report: DerivationReport, *, compacts: bool) -> str:
    from kvdrift.log.store import Store
    from kvdrift.schema.location import is_local
    from kvdrift.sql.catalog_file import may_write_catalog, refresh_catalog

    store = Store.open(location)
    nothing = f"nothing to derive: all events up to version {report.events_version} are derived"
    if not report.units and is_local(store.location) and not may_write_catalog(store):
        return f"{nothing}; the store may only be read, and its catalogue stays as it is"
    if compacts and report.units:
        store.gather()
    refresh_catalog(store)
    if not report.units:
        return nothing
    rate = report.events / max(report.seconds, 1e-9)
    return (
        f"derived {_counts(report)} "
        f"in {report.seconds:.1f} s ({rate:,.0f} events/s); all events up to version {report.events_version} are "
        "derived"
    )


def _watching(location: str, interval: float, *, compacts: bool) -> str:
    bound_memory()
    from kvdrift.transforms.watch import watch
    from kvdrift.upkeep import Upkeep

    gc.freeze()  # imported objects stay, so that no garbage collection needs to search them
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopped.append(received))
    upkeep = Upkeep(location, compacts=compacts)

    def batch_done(batch: DerivationReport) -> None:
        release_memory()
        upkeep.rows_came()
        upkeep.begin_if_due()
        typer.echo(f"derived {batch.units} units, {batch.events} events in {batch.seconds:.2f} s", err=True)
        for failure in batch.failures:
            typer.echo(f"kvdrift: {failure}", err=True)

    def idle() -> None:
        release_memory()  # memory of a compaction that ran beside this process
        upkeep.begin_if_due()

    total = watch(location, interval, lambda: bool(stopped), batch_done, idle, compacts=compacts)
    upkeep.finish()
    return f"derived {_counts(total)}"


def _counts(report: DerivationReport) -> str:
    branchings = f", {report.branchings} residual branchings" if report.branchings else ""
    return f"{report.units} units, {report.trajectories} trajectories{branchings}, {report.events} events"
