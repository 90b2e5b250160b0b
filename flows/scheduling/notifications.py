"""Notifications on the end of a deployment's runs: an automation of the server on the deployment's tag."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from schema.errors import InputError

_ENDS = ("Completed", "Failed", "Crashed")
# A state may have no message, and a server without an address for its pages has no link: Jinja would write "None".
BODY = """{{ flow_run.name }} is {{ flow_run.state.name }}
{{ flow_run.state.message or '' }}
{{ flow_run|ui_url or '' }}"""


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
    """Notify a block TYPE/NAME when a tagged run completes, fails or crashes, in place of any earlier block."""
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - Prefect takes seconds
    from prefect.events.actions import SendNotification  # noqa: PLC0415
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture  # noqa: PLC0415

    name = f"kvdrift: {deployment}: how runs end"
    sent = SendNotification(block_document_id=check_block(block), subject=f"kvdrift study {deployment}", body=BODY)
    ends = {f"prefect.flow-run.{state}" for state in _ENDS}
    trigger = EventTrigger(**each_tagged_run(tag), expect=ends, posture=Posture.Reactive)
    made = AutomationCore(
        name=name, description=f"Made by kvdrift schedule --notify {block}.", trigger=trigger, actions=[sent]
    )
    with get_client(sync_client=True) as client:
        there = client.read_automations_by_name(name)
        if there:
            client.update_automation(there[0].id, made)
        else:
            client.create_automation(made)
