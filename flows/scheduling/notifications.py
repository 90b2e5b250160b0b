"""Notifications on a deployment's runs that end, or that do not start: automations of the server on their tag."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from kvdrift.schema.errors import InputError

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


def check_block(block: str) -> UUID:
    """Return the id of a notification block of the server, given as TYPE/NAME, such as slack-webhook/laboratory."""
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - Prefect takes seconds
    from prefect.exceptions import ObjectNotFound  # noqa: PLC0415

    kind, slash, name = block.partition("/")
    if not (kind and slash and name) or "/" in name:
        raise InputError(f"--notify {block}: write TYPE/NAME of a block, as in slack-webhook/laboratory")
    with get_client(sync_client=True) as client:
        try:
            found = client.read_block_document_by_name(name, kind)
        except ObjectNotFound:
            raise InputError(
                f"--notify {block}: the server has no such block; prefect block ls lists them, and prefect block "
                f"create {kind} makes one"
            ) from None
    schema = found.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise InputError(f"--notify {block}: the block sends no notifications; name one such as slack-webhook/NAME")
    return found.id


def each_tagged_run(tag: str) -> dict[str, Any]:
    """Return the arguments of a trigger that is about every single flow run with a tag."""
    from prefect.events.schemas.events import ResourceSpecification  # noqa: PLC0415 - Prefect takes seconds

    tagged: dict[str, Any] = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
    return {
        "match": ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        "match_related": ResourceSpecification(tagged), "for_each": {"prefect.resource.id"}, "threshold": 1,
    }  # fmt: skip


def notify(deployment: str, tag: str, block: str) -> None:
    """Notify a block TYPE/NAME, in place of any earlier block, when a tagged run ends or does not start in time.

    A run ends if it completes, fails or crashes. A run that waits for the run before it is not late.
    """
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - Prefect takes seconds
    from prefect.events.actions import SendNotification  # noqa: PLC0415
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture  # noqa: PLC0415

    ends, every = _events(*_ENDS), each_tagged_run(tag)
    started = _events("Running", "Cancelled") | ends
    told = {
        "how runs end": (EventTrigger(**every, expect=ends, posture=Posture.Reactive), BODY),
        "runs that do not start": (
            EventTrigger(**every, after=_events("Late"), expect=started, posture=Posture.Proactive, within=OVERDUE),
            _OVERDUE_BODY,
        ),
    }
    sent_to = check_block(block)
    with get_client(sync_client=True) as client:
        for what, (trigger, body) in told.items():
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
