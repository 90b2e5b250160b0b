"""What a notification says, rendered by Prefect's own templates."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from prefect.server.events.jinja_filters import all_filters
from prefect.server.schemas.core import FlowRun
from prefect.server.schemas.states import Completed
from prefect.server.utilities.user_templates import register_user_template_filters, render_user_template
from prefect.settings import PREFECT_UI_URL, temporary_settings

from kvdrift.flows.scheduling.deployments import BODY


@pytest.mark.parametrize("message", [None, "All states completed."])
@pytest.mark.parametrize("ui", [None, "http://localhost:4200"])
def test_a_notification_has_a_link_if_the_server_has_pages(message: str | None, ui: str | None) -> None:
    register_user_template_filters(all_filters)
    run = FlowRun(flow_id=uuid.uuid4(), name="night", state=Completed(message=message))
    with temporary_settings({PREFECT_UI_URL: ui}):
        said = asyncio.run(render_user_template(BODY, {"flow_run": run}))
    link = f"{ui}/runs/flow-run/{run.id}" if ui else ""
    assert said.split("\n") == ["night is Completed", message or "", link]
