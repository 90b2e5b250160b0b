"""Whom a real Prefect server tells how a run ended: a webhook on this machine; `make scheduling`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fixtures.finite_study import write_finite_study
from fixtures.prefect_server import PrefectServer, wait_until

pytestmark = pytest.mark.scheduling

BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
sent = {"subject": "{{subject}}", "body": "{{body}}"}
CustomWebhookNotificationBlock(name="here", url=sys.argv[1], json_data=sent).save("laboratory")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrefectServer]:
    made = PrefectServer(tmp_path / "home")
    with made.serving():
        yield made


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Return an address, and the requests sent there."""
    heard: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Hook) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/hook", heard
        listening.shutdown()
        thread.join()


def test_a_webhook_is_told_how_runs_end(
    server: PrefectServer, webhook: tuple[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    address, heard = webhook
    study = write_finite_study(tmp_path)
    schedule = ("schedule", study, "--store", "store", "--notify")
    for block, line in (
        ("laboratory", "write TYPE/NAME of a block, as in slack-webhook/laboratory"),
        ("custom-webhook/laboratory", "the server has no such block"),
    ):
        with pytest.raises(AssertionError, match=f"kvdrift: --notify {block}: {line}"):
            server.kvdrift(*schedule, block, folder=tmp_path)
    subprocess.run([sys.executable, "-c", BLOCK, address], env=server.environment, check=True, capture_output=True)
    for _ in range(2):  # the second one changes the automation that is there
        printed = server.kvdrift(*schedule, "custom-webhook/laboratory", folder=tmp_path)
    name = next(line for line in printed.splitlines() if line.startswith("deployment: ")).partition(": ")[2]
    assert "notified:   custom-webhook/laboratory, when a run completes, fails or crashes\n" in printed
    made = [one["name"] for one in server.ask("/automations/filter")]
    assert len(made) == len(set(made)) == 3
    with server.working():
        run = server.ended(server.start_run(name))
        assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
        wait_until(lambda: bool(heard))
    assert len(heard) == 1
    assert heard[0]["subject"] == f"kvdrift study {name.partition('/')[2]}"
    assert heard[0]["body"].startswith(f"{run['name']} is Completed")
    assert "None" not in heard[0]["body"]


def test_a_webhook_is_told_of_a_run_that_does_not_start(
    server: PrefectServer, webhook: tuple[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    """There is no worker. The server waits for 10 seconds instead of the 15 minutes that the automation says."""
    address, heard = webhook
    study = write_finite_study(tmp_path)
    subprocess.run([sys.executable, "-c", BLOCK, address], env=server.environment, check=True, capture_output=True)
    options = ("--cron", "0 3 * * *", "--notify", "custom-webhook/laboratory")
    printed = server.kvdrift("schedule", study, "--store", "store", *options, folder=tmp_path)
    assert "notified:   custom-webhook/laboratory, when a run has not started 15 minutes after its time\n" in printed
    name = next(line for line in printed.splitlines() if line.startswith("deployment: ")).partition(": ")[2]
    (there,) = (one for one in server.ask("/automations/filter") if "do not start" in one["name"])
    assert there["trigger"]["within"] == 15 * 60
    server.change(f"/automations/{there['id']}", {**there, "trigger": {**there["trigger"], "within": 10}})
    due = datetime.now(UTC) - timedelta(minutes=1)
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": due.isoformat()}}
    server.ask(f"/deployments/{server.deployment(name)['id']}/create_flow_run", state=state)
    wait_until(lambda: bool(heard))
    assert [one["subject"] for one in heard] == [f"kvdrift study {name.partition('/')[2]}"]
    run, what, _ = heard[0]["body"].split("\n")
    assert run.endswith(" has not started")
    assert f"{due:%Y-%m-%d %H:%M}" in what
