"""``kvdrift run``: a study from its documents to its report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import (
    ClusterOption,
    EndpointOption,
    NoCompactOption,
    RootCertsOption,
    StudyArgument,
    StudyStoreOption,
    TokenOption,
)
from schema.errors import KvdriftError, printable

if TYPE_CHECKING:
    from schema.study import Study


def run(
    study: StudyArgument,
    store: StudyStoreOption = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Generate at most N documents, then stop.")
    ] = None,
    redo: Annotated[
        list[str] | None,
        typer.Option(metavar="ACTION", help="Generate a changed action again; repeat the option for several."),
    ] = None,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan",
            help="Make a new revision of the plan from the changed [plan]; after evaluation the revision is marked "
            "seen.",
        ),
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Stop once the plan is frozen, and print the plan.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the work, time and memory that the run needs, or why it would be refused; write nothing.",
        ),
    ] = False,
    endpoint: EndpointOption = None,
    token_file: TokenOption = None,
    tls_root_certs: RootCertsOption = None,
    endpoint_timeout: Annotated[
        float, typer.Option(min=5, help="Seconds without an answer after which the endpoint counts as lost.")
    ] = 60.0,
    cluster: ClusterOption = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="all|N", help="Generate on all GPUs of this machine, or on N GPUs, with one worker for each."
        ),
    ] = None,
    no_compact: NoCompactOption = False,
) -> None:
    """Run a study from its documents to its report, or go on where an earlier run stopped.

    This process generates the events, or the service that --endpoint names, or the workers of a --cluster or of
    --gpus; the events are the same.
    """
    from kvdrift.console import ConsoleProgress

    with ConsoleProgress() as console:
        console.doing(f"loading what {study.name} needs")  # importing these libraries takes seconds
        from flows.run.options import named_service, named_workers
        from schema.study import load_studies

        studies = load_studies(study)
        address = named_service(endpoint or [], token_file, tls_root_certs, endpoint_timeout)
        workers = named_workers(studies, cluster, gpus, served=address is not None)
    if dry_run:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a dry run downloads nothing
        from flows.run.options import default_location
        from kvdrift.dry_run.description import describe_studies
        from schema.location import absolute

        location = absolute(store if store is not None else default_location(studies))
        on_gpus = len(workers.workers or ()) if workers is not None and gpus is not None else 0
        served = address is not None or cluster is not None
        with ConsoleProgress() as console:
            console.doing("checking and measuring")
            for line in describe_studies(studies, location, redo or [], served=served, gpus=on_gpus, replan=replan):
                typer.echo(line)
        return
    try:
        with ConsoleProgress() as console:
            console.doing("loading libraries, checking documents and model, and starting")
            from flows.run.study_file import run_file

            outcome = run_file(
                studies, store, address, console, limit, redo or [], plan_only=plan_only, replan=replan,
                cluster=workers, compacts=not no_compact,
            )  # fmt: skip
    except KeyboardInterrupt:
        _say_what_is_kept(studies, store)
        raise
    if plan_only and not outcome.documents_left:
        from flows.plan.agreement import require_plan
        from kvdrift.plan_lines import plan_lines
        from log.store import Store

        opened = Store.open(outcome.location)
        for one in studies:
            for line in plan_lines(require_plan(opened, one)):
                typer.echo(line)
        where = "" if store is None else f" --store {shlex.quote(store)}"
        typer.echo(f"the evaluation goes on with: kvdrift run {shlex.quote(str(study))}{where}")
        return
    if not outcome.did_something:
        typer.echo(f"study '{studies[0].name_in_file}' is finished: nothing to do")
    typer.echo(f"store:  {outcome.location}")
    for page in outcome.pages:
        typer.echo(f"report: {page}")
    if outcome.documents_left:
        left = f"{outcome.documents_left} documents of this stage are left"
        typer.echo(f"stopped at --limit {limit}: {left}; run the same command again to go on")


def _say_what_is_kept(studies: Sequence[Study], location: str | None) -> None:
    """Print on standard error what the store of an interrupted run holds; print nothing if no store was begun."""
    from flows.run.options import default_location
    from log.store import Store
    from schema.location import absolute

    store = absolute(location if location is not None else default_location(studies))
    with suppress(KvdriftError):  # there is no store yet
        units = Store.open(store).row_count("units")
        typer.echo(f"kept in {printable(store)}: {units:,} {'unit' if units == 1 else 'units'}", err=True)
