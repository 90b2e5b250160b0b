"""Deployments of studies on the user's Prefect server, which also ends dead runs and notifies when runs end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner
from prefect.runner.storage import LocalStorage
from prefect.schedules import Cron
from prefect.settings import get_current_settings
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from kvdrift.flows.orchestration.server import answering, api_url
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import Study

HEARTBEAT_SECONDS = 30  # Prefect's minimum
_HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
_SILENT_SECONDS = 120.0  # without a heartbeat, after which the process counts as gone
_AUTOMATION = "kvdrift: runs without a heartbeat have crashed"
_TAG = "kvdrift"

_ENDS = ("Completed", "Failed", "Crashed")
# A state may have no message, and a server without an address for its pages has no link: Jinja would write "None".
BODY = """{{ flow_run.name }} is {{ flow_run.state.name }}
{{ flow_run.state.message or '' }}
{{ flow_run|ui_url or '' }}"""

_OVERDUE_BODY = """{{ flow_run.name }} has not started
It was due at {{ flow_run.expected_start_time }}; is a worker of its pool running?
{{ flow_run|ui_url or '' }}"""

OVERDUE: Final = timedelta(minutes=15)
"""After the server has found that a run is late, the time that the run has to start before somebody is notified."""


@dataclass(frozen=True)
class StudySchedule:
    """The study of a deployment, and the options of its runs."""

    study_file: Path  # the study file, an absolute path
    studies: Sequence[Study]  # the file's studies, one for each model
    store: str  # the store, an absolute path or a URL
    cron: str | None  # when runs start; None for runs that are started by hand
    timezone: str  # the time zone of ``cron``, such as Europe/Berlin
    limit: int | None = None  # the most documents that a run generates
    endpoint: str | None = None  # the service that generates
    token_file: Path | None = None  # the file with the service's token
    tls_root_certs: Path | None = None  # the file of the authorities that vouch for the service
    cluster: str | None = None  # the Dask scheduler whose workers generate
    gpus: str | None = None  # how many GPUs of the worker's machine generate
    notify: str | None = None  # the notification block that receives the ends of runs, as TYPE/NAME

    @property
    def tag(self) -> str:
        """The tag that this deployment's runs have if notifications on their ends are requested."""
        return f"{_TAG}:{self.name}"

    @property
    def name(self) -> str:
        """The deployment's name: the study's, with the store's name if that differs."""
        study, folder = self.studies[0].name_in_file, self.store.rstrip("/").rpartition("/")[2]
        return study if folder == study else f"{study}, {folder}"

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of ``kvdrift.flows.scheduling.flows.study``."""
        return {
            "study_file": str(self.study_file),
            "store": self.store,
            "limit": self.limit,
            "endpoints": None if self.endpoint is None else [self.endpoint],
            "token_file": None if self.token_file is None else str(self.token_file.absolute()),
            "tls_root_certs": None if self.tls_root_certs is None else str(self.tls_root_certs.absolute()),
            "cluster": self.cluster,
            "gpus": self.gpus,
        }

    @property
    def description(self) -> str:
        """The text of the deployment's page."""
        models = ", ".join(dict.fromkeys(study.model.id for study in self.studies))
        return (
            f"Study '{self.studies[0].name_in_file}' on {models}, from {self.study_file} into {self.store}. "
            "Each run goes on where the run before stopped. One run works at a time; others wait."
        )


@dataclass(frozen=True)
class Deployed:
    """A deployment on the server."""

    name: str  # FLOW/NAME, the form that Prefect's commands take
    page: str | None  # the address of the deployment's page; None if the server has no pages


def check_cron(cron: str, timezone: str) -> None:
    """Check a schedule's cron text and time zone."""
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
        if "timezone" in wrong:
            raise InputError(f"--timezone {timezone}: there is no such zone; write one such as Europe/Berlin") from None
        raise InputError(f"--cron '{cron}': write minute, hour, day, month and weekday, as \"0 3 * * *\"") from None


@contextmanager
def users_server() -> Iterator[str]:
    """Yield the address of the user's Prefect server, after a check that the server answers.

    Failures of the server within the block become errors of one line.
    """
    url = api_url()
    if url is None:
        raise InputError(
            "no Prefect server is named; start one with `prefect server start`, and name it with "
            "`prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    with answering(url):
        yield url


def deploy(schedule: StudySchedule, work_pool: str) -> Deployed:
    """Make the deployment for the workers of a pool, in place of any deployment of the same name.

    The pool is made if it is missing. Runs start in the present working folder.
    """
    deployment = _deployment(schedule, work_pool)
    _check_store(deployment, schedule)
    if schedule.notify is not None:
        check_block(schedule.notify)
    _make_pool(work_pool)
    deployment.storage = LocalStorage(str(Path.cwd()))  # workers start runs in that folder, and copy nothing
    identifier: Any = deployment.apply()
    _end_silent_runs()
    if schedule.notify is not None:
        notify(schedule.name, schedule.tag, schedule.notify)
    return Deployed(deployment.full_name, _page(identifier))


def serve(schedule: StudySchedule) -> None:
    """Make the deployment, and run it from this process until an interrupt, which pauses its schedule."""
    deployment = _deployment(schedule, None)
    _check_store(deployment, schedule)
    _end_silent_runs()
    if schedule.notify is not None:
        notify(schedule.name, schedule.tag, schedule.notify)

    async def stay() -> None:
        runner = Runner(name=schedule.name, heartbeat_seconds=HEARTBEAT_SECONDS)
        await runner.aadd_deployment(deployment)
        await runner.start()

    asyncio.run(stay())


def _deployment(schedule: StudySchedule, work_pool: str | None) -> RunnerDeployment:
    """Return the deployment, not yet on the server.

    A second run of a store waits for the first, and then does the remaining work, including work that was added
    meanwhile. Prefect's other strategy cancels a run that cannot start at once, and so would cancel a run that follows
    a killed run, whose slot stays taken for minutes.
    """
    from kvdrift.flows.scheduling.flows import study  # noqa: PLC0415 - torch takes seconds

    tags = [_TAG, schedule.studies[0].name_in_file, *dict.fromkeys(study.model.id for study in schedule.studies)]
    if schedule.notify is not None:
        tags.append(schedule.tag)
    deployed: RunnerDeployment = RunnerDeployment.from_flow(
        study,
        name=schedule.name,
        schedule=None if schedule.cron is None else Cron(schedule.cron, timezone=schedule.timezone),
        parameters=schedule.parameters,
        description=schedule.description,
        tags=tags,
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        work_pool_name=work_pool,
        job_variables=None if work_pool is None else {"env": {_HEARTBEAT: str(HEARTBEAT_SECONDS)}},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return deployed


def _check_store(deployment: RunnerDeployment, schedule: StudySchedule) -> None:
    """Refuse a name that a deployment for another store has."""
    with get_client(sync_client=True) as client:
        try:
            there = client.read_deployment_by_name(deployment.full_name)
        except ObjectNotFound:
            return
    if (store := there.parameters.get("store")) not in {None, schedule.store}:
        raise InputError(
            f"deployment '{deployment.full_name}' is of the store {store}, not {schedule.store}; give the store's "
            f"folder another name, or delete the other deployment: prefect deployment delete '{deployment.full_name}'"
        )


def _make_pool(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            kind = client.read_work_pool(name).type
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
            return
    if kind != "process":
        raise InputError(f"--work-pool {name}: is of type {kind}, and runs need one of type process; give another name")


def _end_silent_runs() -> None:
    """Have the server end our runs that no longer give a heartbeat, unless it does so already.

    Otherwise a run whose process and worker are gone, as after a power cut, would stay "Running".
    """
    beat = "prefect.flow-run.heartbeat"
    ends = _events(*_ENDS, "Cancelled", "Cancelling")
    trigger = EventTrigger(
        **each_tagged_run(_TAG), after={beat}, expect={beat, *ends}, posture=Posture.Proactive,
        within=timedelta(seconds=_SILENT_SECONDS),
    )  # fmt: skip
    crashed = ChangeFlowRunState(
        name=None,
        state=StateType.CRASHED,
        force=False,
        message=f"no heartbeat for {_SILENT_SECONDS:.0f} s: its process is gone; the next run goes on",
    )
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(_AUTOMATION):
            client.create_automation(
                AutomationCore(
                    name=_AUTOMATION,
                    description="Made by kvdrift schedule, for flow runs with the tag kvdrift.",
                    trigger=trigger,
                    actions=[crashed],
                )
            )


def _page(identifier: object) -> str | None:
    base = get_current_settings().ui_url
    return None if base is None else f"{base}/deployments/deployment/{identifier}"


def check_block(block: str) -> UUID:
    """Return the id of a notification block of the server, given as TYPE/NAME, such as slack-webhook/laboratory."""
    kind, slash, name = block.partition("/")
    if not (kind and slash and name) or "/" in name:
        raise InputError(f"--notify {block}: write TYPE/NAME of a block, as in slack-webhook/laboratory")
    with get_client(sync_client=True) as client:
        try:
            document = client.read_block_document_by_name(name, kind)
        except ObjectNotFound:
            raise InputError(
                f"--notify {block}: the server has no such block; prefect block ls lists them, and prefect block "
                f"create {kind} makes one"
            ) from None
    schema = document.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise InputError(f"--notify {block}: the block sends no notifications; name one such as slack-webhook/NAME")
    return document.id


def each_tagged_run(tag: str) -> dict[str, Any]:
    """Return the arguments of a trigger that fires separately for each flow run with the tag ``tag``."""
    tagged: dict[str, Any] = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
    return {
        "match": ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        "match_related": ResourceSpecification(tagged), "for_each": {"prefect.resource.id"}, "threshold": 1,
    }  # fmt: skip


def notify(deployment: str, tag: str, block: str) -> None:
    """Have the server notify ``block``, TYPE/NAME, when a run with the tag ends or does not start in time.

    The block takes the place of an earlier block of the deployment. A run ends if it completes, fails or crashes. A run
    that waits for the run before it is not late.
    """
    ends, every = _events(*_ENDS), each_tagged_run(tag)
    started = _events("Running", "Cancelled") | ends
    notifications = {
        "how runs end": (EventTrigger(**every, expect=ends, posture=Posture.Reactive), BODY),
        "runs that do not start": (
            EventTrigger(**every, after=_events("Late"), expect=started, posture=Posture.Proactive, within=OVERDUE),
            _OVERDUE_BODY,
        ),
    }
    sent_to = check_block(block)
    with get_client(sync_client=True) as client:
        for what, (trigger, body) in notifications.items():
            sent = SendNotification(block_document_id=sent_to, subject=f"kvdrift study {deployment}", body=body)
            made = AutomationCore(
                name=f"kvdrift: {deployment}: {what}",
                description=f"Made by kvdrift schedule --notify {block}.",
                trigger=trigger,
                actions=[sent],
            )
            if there := client.read_automations_by_name(made.name):
                client.update_automation(there[0].id, made)
            else:
                client.create_automation(made)


def _events(*states: str) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}
