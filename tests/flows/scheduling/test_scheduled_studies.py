"""Studies that a real Prefect server and worker run: killed, gone on with, grown, cancelled; `make scheduling`."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from fixtures.prefect_server import PrefectServer, clone, wait_until
from fixtures.small_study import ADDED_ACTION, write_study

from kvdrift.flows.orchestration.flow_run import as_stage
from kvdrift.flows.orchestration.server import named_server
from kvdrift.log.store import Store

pytestmark = pytest.mark.scheduling

NAME = "kvdrift study/small, store"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A server that knows nothing yet."""
    made = PrefectServer(tmp_path_factory.mktemp("home"))
    with made.serving():
        yield made


@pytest.fixture(scope="module")
def folder(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a study, which is deployed, and a worker."""
    made = tmp_path_factory.mktemp("folder")
    write_study(made)
    schedule = ("schedule", "small.toml", "--store", "store", "--cron")
    server.kvdrift(*schedule, "0 4 * * *", folder=made)
    printed = server.kvdrift(*schedule, "0 3 * * *", "--timezone", "Europe/Berlin", folder=made)
    assert "worker:     prefect worker start --pool kvdrift --type process\n" in printed
    assert f"now:        prefect deployment run '{NAME}'\n" in printed
    with server.working():
        yield made


def units(folder: Path, store: str = "store") -> Counter[tuple[str, str]]:
    """Return the number of units of each document and action, including units without a row after a killed run."""
    rows = Store.create(folder / store).read("units", columns=["doc", "action"]).to_pylist()
    return Counter((row["doc"], row["action"]) for row in rows)


def test_what_is_deployed(server: PrefectServer, folder: Path) -> None:
    """Scheduling again changes the one deployment: it has the newer time alone."""
    there = server.deployment(NAME)
    assert [(one["schedule"]["cron"], one["schedule"]["timezone"]) for one in there["schedules"]] == [
        ("0 3 * * *", "Europe/Berlin")
    ]
    assert there["parameters"]["store"] == str(folder / "store")
    assert there["tags"] == ["kvdrift", "small", "kvdrift/tiny"]
    assert there["global_concurrency_limit"]["limit"] == 1
    assert there["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    assert there["enforce_parameter_schema"]
    kinds = there["parameter_openapi_schema"]["properties"]
    assert kinds["study_file"]["type"] == "string"
    assert {kind.get("type") for kind in kinds["limit"]["anyOf"]} == {"integer", "null"}
    (automation,) = server.ask("/automations/filter")
    assert automation["trigger"]["within"] == 120
    assert there["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"


@pytest.mark.usefixtures("folder")
def test_the_server_has_runs_of_the_cron_schedule_waiting(server: PrefectServer) -> None:
    """At three in Berlin, of the newer time alone: a deployment whose times are right runs only if these are made."""
    deployment = {"id": {"any_": [server.deployment(NAME)["id"]]}}

    def waiting() -> set[str]:
        runs = server.ask("/flow_runs/filter", deployments=deployment, limit=100)
        times = [datetime.fromisoformat(run["expected_start_time"]) for run in runs if run["auto_scheduled"]]
        return {time.astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M") for time in times}

    wait_until(lambda: waiting() == {"03:00"})


def test_a_killed_run_is_gone_on_with_and_a_grown_study_computes_what_is_new(
    server: PrefectServer, folder: Path
) -> None:
    killed = server.start_run(NAME)
    wait_until((folder / "store" / "events" / "_delta_log" / f"{1:020}.json").exists)
    _, _, pid = server.run(killed)["infrastructure_pid"].rpartition(":")
    os.kill(int(pid), signal.SIGKILL)
    assert server.ended(killed)["state"]["type"] == "CRASHED"
    kept = units(folder)

    done = server.ended(server.start_run(NAME))
    assert done["state"]["type"] == "COMPLETED", done["state"]["message"]
    assert done["name"] == "small, kvdrift/tiny"
    assert set(done["tags"]) == {"kvdrift", "small", "kvdrift/tiny"}
    whole = units(folder)
    assert kept
    assert kept.keys() < whole.keys()
    assert set(whole.values()) == {1}
    assert any(line.startswith("evaluation documents: ") for line in server.logs(done["id"]))
    shown = server.artifacts()
    assert {row["action"] for row in _rows(shown["small-kvdrift-tiny-decomposition"])} == {
        "full", "snapkv-half", "recent-half",
    }  # fmt: skip
    assert shown["small-progress"]["data"] == 100
    assert str(folder / "store" / "report" / "small" / "index.html") in shown["small-kvdrift-tiny-report"]["data"]
    assert shown["small-kvdrift-tiny-headline"]["data"].startswith("**")

    write_study(folder, ADDED_ACTION)
    grown = server.ended(server.start_run(NAME))
    assert grown["state"]["type"] == "COMPLETED", grown["state"]["message"]
    new = units(folder) - whole
    assert {action for _, action in new} == {"snapkv-100"}
    assert whole <= units(folder)
    assert "snapkv-100" in {row["action"] for row in _rows(server.artifacts()["small-kvdrift-tiny-decomposition"])}


def test_a_cancelled_run_stops_and_the_next_one_goes_on(server: PrefectServer, folder: Path) -> None:
    long = folder / "of"
    long.mkdir()
    write_study(long, ('name = "small"', 'name = "long"'), ("development = 2", "development = 150"))
    server.kvdrift("schedule", long / "small.toml", "--store", "long", folder=folder)
    name = "kvdrift study/long"
    cancelled = server.start_run(name)
    wait_until((folder / "long" / "events" / "_delta_log" / f"{1:020}.json").exists)
    server.ask(f"/flow_runs/{cancelled}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    ended = server.ended(cancelled)
    assert ended["state"]["type"] == "CANCELLED"
    _, _, pid = ended["infrastructure_pid"].rpartition(":")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    kept = units(folder, "long")
    assert 0 < len(kept) < 150 * 3  # documents by actions
    next_one = server.ended(server.start_run(name, limit=1))
    assert next_one["state"]["type"] == "COMPLETED", next_one["state"]["message"]
    assert next_one["state"]["message"].startswith("stopped at the limit of 1: ")
    new = units(folder, "long") - kept
    assert len({doc for doc, _ in new}) == 1
    assert kept <= units(folder, "long")


@pytest.mark.usefixtures("folder")
def test_a_mistake_in_the_study_file_is_one_line(server: PrefectServer) -> None:
    failed = server.ended(server.start_run(NAME, study_file="missing.toml"))
    assert (failed["state"]["type"], failed["name"]) == ("FAILED", "missing")
    assert failed["state"]["message"].startswith("missing.toml: ")


def test_the_repositorys_deployments(server: PrefectServer, folder: Path) -> None:
    """``prefect deploy --all`` works as docs/scheduling.md says; ``kvdrift schedule`` has made the pool."""
    here = clone(folder / "clone")
    server.prefect("--no-prompt", "deploy", "--all", folder=here)
    for name in ("kvdrift study/nightly", "kvdrift study/on-demand", "kvdrift recompute/recompute"):
        there = server.deployment(name)
        assert there["global_concurrency_limit"]["limit"] == 1
        assert there["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": str(here)}}]
    again = server.ended(server.start_run("kvdrift recompute/recompute", store=str(folder / "store")))
    assert again["state"]["type"] == "COMPLETED", again["state"]["message"]
    assert again["name"] == "recompute store"


def test_a_run_of_the_command_is_a_flow_run_of_the_server(server: PrefectServer, tmp_path: Path) -> None:
    write_study(tmp_path, ('name = "small"', 'name = "named"'))
    assert "report: " in server.kvdrift("run", "small.toml", "--store", "store", folder=tmp_path)
    (run,) = server.ask("/flow_runs/filter", flow_runs={"name": {"any_": ["named, kvdrift/tiny"]}})
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    tasks = server.ask("/task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})
    assert len(tasks) == 11  # the stages, of which derivation and scores come twice
    assert server.artifacts()["named-progress"]["data"] == 100
    assert not (tmp_path / "store" / ".prefect").exists()


def test_a_stage_runs_as_often_as_the_flow_says(server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's setting of persisted results would let Prefect serve the second derivation from its cache."""
    monkeypatch.setenv("PREFECT_API_URL", server.environment["PREFECT_API_URL"])
    monkeypatch.setenv("PREFECT_RESULTS_PERSIST_BY_DEFAULT", "true")
    before, root, calls = dict(os.environ), logging.getLogger(), list[str]()
    level, handlers = root.level, list(root.handlers)
    with named_server() as named:
        assert named
        from prefect import flow  # noqa: PLC0415

        def derive(location: str) -> int:
            calls.append(location)
            return len(calls)

        @flow(name="twice")
        def twice() -> list[int]:
            stage = as_stage(derive)
            return [stage("store"), stage("store")]

        assert twice() == [1, 2]

        @flow(name="idle")
        def idle() -> list[tuple[str, str, str | None]]:
            """Return the states of a stage that has nothing to do, and of a stage that has work."""
            states = (as_stage(one, "all is there")("store", return_state=True) for one in (lambda _: 0, lambda _: 3))
            return [(state.type.value, state.name, state.message) for state in states]

        assert idle() == [("COMPLETED", "Skipped", "all is there"), ("COMPLETED", "Completed", None)]
    assert len(calls) == 2
    assert (dict(os.environ), root.level, root.handlers) == (before, level, handlers), "as before"


def _rows(artifact: dict[str, str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(artifact["data"])
    return rows
