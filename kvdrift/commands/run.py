"""``kvdrift run``: a study from its documents to its report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import ClusterOption, TokenOption
from schema.errors import InputError

if TYPE_CHECKING:
    from flows.cluster.address import ClusterAddress
    from flows.study_flow import Outcome
    from generator.service.client import ServiceAddress
    from schema.progress import Progress
    from schema.study import Study


def run(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.")],
    store: Annotated[
        str | None, typer.Option("--store", metavar="DIR", help="Folder or URL of the store; stores/NAME by default.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Generate N documents at most, then stop.")
    ] = None,
    redo: Annotated[
        list[str] | None,
        typer.Option("--redo", metavar="ACTION", help="Generate an action anew, as it is now; repeat it for several."),
    ] = None,
    replan: Annotated[
        bool,
        typer.Option("--replan", help="Plan anew, as [plan] is now: a later revision, marked seen after evaluation."),
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Stop when the plan is frozen, and print it; print one that is there.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what the run would refuse, or what it would do and need; write nothing."),
    ] = False,
    endpoint: Annotated[
        list[str] | None,
        typer.Option("--endpoint", metavar="URI", help="grpc://HOST:PORT of a kvdrift serve; repeat it for several."),
    ] = None,
    token_file: TokenOption = None,
    tls_root_certs: Annotated[
        Path | None,
        typer.Option(
            "--tls-root-certs", metavar="FILE", help="PEM file of the authorities to trust; the system's by default."
        ),
    ] = None,
    endpoint_timeout: Annotated[
        float, typer.Option("--endpoint-timeout", min=5, help="Seconds of silence after which an endpoint is given up.")
    ] = 60.0,
    cluster: ClusterOption = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="all|N", help="Generate on all GPUs of this machine, or N: one worker each."),
    ] = None,
) -> None:
    """Run a study from its documents to its report, or go on where an earlier run stopped.

    This process generates the events, or the services that --endpoint names, or the workers of a --cluster or of
    --gpus; the events are the same.
    """
    from schema.study import load_studies

    studies = load_studies(study)
    addresses = _addresses(endpoint or [], token_file, tls_root_certs, endpoint_timeout)
    workers = _workers(studies, cluster, gpus, served=bool(addresses))
    if dry_run:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not on this machine is not fetched
        from kvdrift.dry_run import describe_studies
        from schema.location import absolute

        location = absolute(store if store is not None else default_location(studies))
        on_gpus = len(workers.workers or ()) if workers is not None and gpus is not None else 0
        served = bool(addresses or cluster)
        for line in describe_studies(studies, location, redo or [], served=served, gpus=on_gpus, replan=replan):
            typer.echo(line)
        return
    from kvdrift.console import ConsoleProgress

    with ConsoleProgress() as console:
        outcome = run_file(
            studies, store, addresses, console, limit, redo or [], plan_only=plan_only, replan=replan, cluster=workers
        )
    if plan_only and not outcome.documents_left:
        from flows.frozen_plan import require_plan
        from kvdrift.plan_lines import plan_lines
        from schema.store.store import Store

        opened = Store.open(outcome.location)
        for one in studies:
            for line in plan_lines(require_plan(opened, one)):
                typer.echo(line)
        where = "" if store is None else f" --store {shlex.quote(store)}"
        typer.echo(f"the evaluation goes on with: kvdrift run {shlex.quote(str(study))}{where}")
        return
    if not outcome.did_something:
        typer.echo(f"study '{studies[0].name}' is finished: nothing to do")
    typer.echo(f"store:  {outcome.location}")
    for page in outcome.pages:
        typer.echo(f"report: {page}")
    if outcome.documents_left:
        left = f"{outcome.documents_left} documents of this stage are left"
        typer.echo(f"stopped at --limit {limit}: {left}; run the same command again to go on")


def default_location(studies: Sequence[Study]) -> str:
    """Return ``stores/NAME`` in the working folder."""
    return str(Path("stores") / studies[0].name)


def run_file(
    studies: Sequence[Study],
    store: str | Path | None,
    addresses: Sequence[ServiceAddress],
    progress: Progress,
    limit: int | None = None,
    redo: Sequence[str] = (),
    *,
    plan_only: bool = False,
    replan: bool = False,
    cluster: ClusterAddress | None = None,
) -> Outcome:
    """Run the studies of one file, one to a model; without ``addresses`` of services or a ``cluster``, in this process.

    The run stops where it has generated ``limit`` documents, and with ``plan_only`` where the plans are frozen. The
    units of the actions ``redo`` are superseded first, and with ``replan`` the plans are made anew.

    Raises:
        InputError: the study file, the store, a service or a worker is not as it must be.
        OperationError: the work failed.

    """
    from flows.checks import check_study
    from flows.study_flow import run_studies
    from flows.study_run import DocumentLimit, StudyRun
    from kvdrift.generators import generators
    from schema.location import absolute

    location = absolute(store if store is not None else default_location(studies))
    shared = DocumentLimit(limit)
    with generators(studies, addresses, cluster, progress) as by:
        runs = [
            StudyRun(study, location, by.made_by, progress, shared, by.identify, by.derived_by, by.sides, replan=replan)
            for study in studies
        ]
        for one in runs:
            check_study(one, served=by.served)
        return run_studies(runs, lambda: by.get_ready(runs, redo), redo, plan_only=plan_only)


def _workers(studies: Sequence[Study], cluster: str | None, gpus: str | None, *, served: bool) -> ClusterAddress | None:
    """The cluster that one of the options names."""
    from flows.cluster.address import ClusterAddress

    who = {"--gpus": gpus is not None, "--cluster": cluster is not None, "--endpoint": served}
    given = [option for option, there in who.items() if there]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: each says who generates; give one of them")
    if gpus is not None:
        return ClusterAddress.of_gpus(gpus, studies)
    return None if cluster is None else ClusterAddress.parse(cluster)


def _addresses(
    locations: list[str], token_file: Path | None, root_certificates: Path | None, timeout: float
) -> list[ServiceAddress]:
    """The services that the options name."""
    given = {"--token-file": token_file, "--tls-root-certs": root_certificates}
    for name, value in given.items():
        if value is not None and not locations:
            raise InputError(f"{name}: says how to reach an endpoint; add --endpoint grpc://HOST:PORT")
    for location in locations:
        if locations.count(location) > 1:
            raise InputError(f"--endpoint {location}: is given twice; give each endpoint once")
    if not locations:
        return []
    from generator.service.client import ServiceAddress
    from kvdrift.credentials import read_pem, read_token

    token = None if token_file is None else read_token(token_file)
    certificates = None if root_certificates is None else read_pem("--tls-root-certs", root_certificates)
    return [ServiceAddress(location, token, certificates, timeout) for location in locations]
