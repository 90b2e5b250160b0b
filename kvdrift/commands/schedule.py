"""``kvdrift schedule``: make a study a deployment on the user's Prefect server."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift.options import (
    ClusterOption,
    EndpointOption,
    RootCertsOption,
    StudyArgument,
    StudyStoreOption,
    TokenOption,
)
from kvdrift.schema.errors import InputError

_POOL = "kvdrift"


def schedule(
    study: StudyArgument,
    cron: Annotated[
        str | None,
        typer.Option(metavar='"M H D M W"', help="The times of the runs; without --cron, runs are started by hand."),
    ] = None,
    timezone: Annotated[
        str, typer.Option(metavar="ZONE", help="The time zone of --cron, such as Europe/Berlin.")
    ] = "UTC",
    store: StudyStoreOption = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Generate at most N documents in a run.")
    ] = None,
    endpoint: EndpointOption = None,
    token_file: TokenOption = None,
    tls_root_certs: RootCertsOption = None,
    cluster: ClusterOption = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="all|N", help="Generate on all GPUs of the worker's machine, or on N GPUs.")
    ] = None,
    work_pool: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The work pool, of type process, whose workers run the study; by default: kvdrift."
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCK", help="Send a notification through a block of the server, TYPE/NAME, when a run ends."
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Keep this process running, and run the study in it.")] = False,
) -> None:
    """Have a Prefect server start a study: each run goes on where the run before stopped.

    The server is that of PREFECT_API_URL or of the active Prefect profile. Only one run of a deployment works at a
    time; others wait.

    Examples:
        kvdrift schedule my-study.toml --cron "0 3 * * *"
    """
    from kvdrift.flows.cluster.address import check_gpus, default_location, named_service, named_workers
    from kvdrift.flows.scheduling.deployments import OVERDUE, StudySchedule, check_cron, deploy, users_server
    from kvdrift.flows.scheduling.deployments import serve as serve_deployment
    from kvdrift.schema.location import absolute
    from kvdrift.schema.study import load_studies

    if serve and work_pool is not None:
        raise InputError(f"--work-pool {work_pool}: with --serve, this process runs the study; give one of the two")
    studies = load_studies(study)
    service = named_service(endpoint or [], token_file, tls_root_certs, timeout=60.0)
    if gpus is None or cluster is not None or service is not None:
        named_workers(studies, cluster, gpus, served=service is not None)
    else:
        check_gpus(gpus, studies)  # the number of GPUs is known only on the machine that runs
    if cron is not None:
        check_cron(cron, timezone)
    planned = StudySchedule(
        study.absolute(), studies, absolute(store if store is not None else default_location(studies)), cron, timezone,
        limit, None if service is None else service.location, token_file, tls_root_certs, cluster, gpus, notify,
    )  # fmt: skip
    when = "when started by hand" if cron is None else f"{cron} ({timezone})"
    with users_server() as server:
        typer.echo(f"server:     {server}")
        if serve:
            typer.echo(f"deployment: kvdrift study/{planned.name}, served by this process until Ctrl-C")
            typer.echo(f"runs:       {when}")
            serve_deployment(planned)
            return
        pool = work_pool or _POOL
        deployed = deploy(planned, pool)
    typer.echo(f"deployment: {deployed.name}")
    if notify is not None:
        typer.echo(f"notified:   {notify}, when a run completes, fails or crashes")
        typer.echo(f"notified:   {notify}, when a run has not started {OVERDUE.seconds // 60} minutes after its time")
    if deployed.page is not None:
        typer.echo(f"page:       {deployed.page}")
    typer.echo(f"runs:       {when}")
    typer.echo(f"worker:     prefect worker start --pool {pool} --type process")
    typer.echo(f"now:        prefect deployment run '{deployed.name}'")
