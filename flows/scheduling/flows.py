"""The flows that deployments run: a study, and a recomputation from a store's events.

The flows' parameters are of plain types, so that Prefect's page can show and edit them. A user's mistake becomes the
run's state, in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from kvdrift.flows.cluster.address import named_service, named_workers
from kvdrift.flows.estimate.stored import estimate_stored
from kvdrift.flows.orchestration.flow_run import FlowRunPage, as_stage, retried
from kvdrift.flows.pages.reports import model_in_path, page_beside, page_folder, report_is_current, write_report
from kvdrift.flows.run.study import FLOW, run_file, run_name
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.store import Store
from kvdrift.log.studies import model_revisions, stored_studies
from kvdrift.schema.errors import KvdriftError
from kvdrift.schema.location import absolute
from kvdrift.schema.study import load_studies
from kvdrift.sql.catalog_file import refresh_catalog
from kvdrift.transforms.pipeline import run_derivation

RECOMPUTE = "kvdrift recompute"
_TIMEOUT = 60.0  # seconds of silence after which an endpoint counts as lost

Name = Annotated[str, Field(min_length=1)]


def _in_one_line(body: Callable[..., str]) -> Callable[..., Any]:
    """Wrap a flow's function so that the run's state is Completed or Failed, with a line on the result or the error."""

    @wraps(body)
    def ending(*arguments: Any, **keywords: Any) -> Any:
        try:
            return Completed(message=body(*arguments, **keywords))
        except KvdriftError as error:
            get_run_logger().error("%s", error)
            return Failed(message=str(error), data=error)

    return ending


def _study_run_name() -> str:
    parameters = flow_run.parameters
    try:
        studies = load_studies(Path(parameters["study_file"]))
    except KvdriftError:  # the run has reported it itself
        return str(Path(parameters["study_file"]).stem)
    return run_name(studies)


@flow(name=FLOW, flow_run_name=_study_run_name, persist_result=False)
@_in_one_line
def study(
    study_file: Name,
    store: Name | None = None,
    limit: Annotated[int, Field(ge=1)] | None = None,
    redo: list[Name] | None = None,
    endpoints: list[Name] | None = None,
    token_file: Name | None = None,
    tls_root_certs: Name | None = None,
    cluster: Name | None = None,
    gpus: Name | None = None,
) -> str:
    """Run a study from its documents to its report, or go on where an earlier run stopped.

    Args:
        study_file: The study file; a relative path is relative to the deployment's working folder.
        store: Folder or URL of the store; stores/NAME in the working folder by default.
        limit: Generate so many documents at most, then stop; the next run goes on.
        redo: Names of actions that are generated anew.
        endpoints: grpc://HOST:PORT of the kvdrift serve that generates: a list with one address.
        token_file: File with the token that the endpoint requires.
        tls_root_certs: PEM file of the certificate authorities to trust.
        cluster: tcp://HOST:PORT of a Dask scheduler whose workers generate; local:N starts N workers for this run.
        gpus: all, to generate on all GPUs of the machine of this run, or the number of GPUs.
    """
    studies = load_studies(Path(study_file))
    page = FlowRunPage()
    page.open(studies[0].name_in_file)
    service = named_service(endpoints or [], _path(token_file), _path(tls_root_certs), _TIMEOUT)
    workers = named_workers(studies, cluster, gpus, served=service is not None)
    outcome = run_file(studies, store, service, page, limit, redo or [], cluster=workers)
    if not outcome.did_something:
        return f"finished before: nothing to do; store {outcome.location}"
    if outcome.documents_left:
        left = f"{outcome.documents_left} documents of this stage are left"
        return f"stopped at the limit of {limit}: {left}; the next run goes on; store {outcome.location}"
    return f"report {', '.join(map(str, outcome.pages))}; store {outcome.location}"


def derive_store(location: str, page: FlowRunPage) -> int:
    """Derive underived units, gather small files and refresh the catalogue; return the number of new units."""
    done, store = run_derivation(location).units, Store.open(location)
    page.say(f"derived {done} new units" if done else "all events are derived")
    if done:
        store.gather()
        refresh_catalog(store)
    return done


def estimate_study(location: str, study: str, model: str, page: FlowRunPage) -> int:
    """Score and estimate a study, unless that is done; return the number of estimates."""
    store = Store.open(location)
    _, _, count = estimate_stored(store, study, model, page)
    refresh_catalog(store)
    page.say(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))
    return count


def study_page(location: str, study: str, model: str, page: FlowRunPage) -> Path:
    """Write a study's report, unless it is current; return the path of its page."""
    store = Store.open(location)
    studies = stored_studies(store)
    folder = page_folder(store, study, model, studies)
    report = folder / "index.html"
    if not report_is_current(store, folder):
        text = token_reader(model, revision=model_revisions(store).get((study, model)))
        beside = page_beside(store, study, model_in_path(study, model, studies))
        report = write_report(store, study, model, folder, token_text=text, progress=page, beside=beside)
    page.publish(store, study, model, report)
    return report


def _recompute_run_name() -> str:
    return f"recompute {Path(flow_run.parameters['store']).name}"


@flow(name=RECOMPUTE, flow_run_name=_recompute_run_name, persist_result=False)
@_in_one_line
def recompute(store: Name) -> str:
    """Derive a store's events, estimate and write the reports of its studies, if they are not up to date.

    Args:
        store: Folder or URL of the store; a relative path is relative to the deployment's working folder.
    """
    page = FlowRunPage()
    page.open(Path(store).name)

    def staged(function: Callable[..., Any]) -> Any:
        return as_stage(function, **retried())

    location = absolute(store)
    studies = stored_studies(Store.open(location))
    staged(derive_store)(location, page)
    for name, model in studies:
        staged(estimate_study)(location, name, model, page)
    pages = [staged(study_page)(location, name, model, page) for name, model in studies]
    return f"report {', '.join(map(str, pages))}; store {location}"


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
