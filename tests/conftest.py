"""What every test needs: one torch thread per process, and no network behind a mistyped model id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fixtures.shared import made_once
from fixtures.small_study import write_study

from schema.store.store import Store
from sql.catalog import refresh_catalog

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["fixtures.browser"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

# The files that take longest come first, so that workers end together. Of the first two, one makes the finished study,
# which others wait for. It is also the first of those that fork processes, and takes a worker with them.
FORKING = (
    "flows/test_study.py", "generator/service/test_service.py", "transforms/test_pipeline.py", "schema/test_store.py",
    "schema/test_schema_versions.py", "flows/cluster/test_cluster.py",
    "transforms/test_runners.py",
)  # fmt: skip
LONG = (
    "flows/test_object_storage.py", "sql/test_exact_truth.py", "sql/test_materialization.py", "report/test_report.py",
    "flows/test_growth.py", "transforms/test_compaction.py", "verification/test_verification.py",
    "flows/test_identities.py", "layout/test_imports.py", "flows/test_revisions.py",
    "stats/test_estimators.py", "flows/test_analysis.py", "faults/test_lost_logs.py", "sql/test_url_store.py",
    "sql/test_exact_published.py", "flows/test_plan.py", "flows/test_orchestration.py", "sql/test_views.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    order = {Path(__file__).parent / name: place for place, name in enumerate((*FORKING, *LONG))}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Hand out whole files, and those that fork processes together."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - the hook is xdist's own

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "forking" if file.removeprefix("tests/") in FORKING else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The small study run to its end by the command, once for all workers: its store, what it printed and what it said.

    Nothing may be written to this store, which every worker reads.
    """

    def run(folder: Path) -> None:
        command = [sys.executable, "-m", "kvdrift", "run", write_study(folder), "--store", folder / "store"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "report: " in done.stdout
        (folder / "said.json").write_text(json.dumps([done.stdout, done.stderr]))

    folder = made_once(tmp_path_factory, "unbroken", run)
    out, err = json.loads((folder / "said.json").read_text())
    return folder / "store", out, err


@pytest.fixture(scope="session")
def finished(unbroken: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the unbroken run, copied for this worker; tests that write to it take a copy."""
    location = tmp_path_factory.mktemp("finished") / "store"
    shutil.copytree(unbroken[0], location, ignore=shutil.ignore_patterns(".prefect"))
    refresh_catalog(Store.open(location))
    return location


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the quickstart, which takes minutes and is for slow tests; nothing may be written to it."""

    def run(folder: Path) -> None:
        study = Path(__file__).parents[1] / "studies" / "quickstart.toml"
        command = [sys.executable, "-m", "kvdrift", "run", study, "--store", folder / "store"]
        subprocess.run(command, check=True, timeout=1800, capture_output=True)

    return made_once(tmp_path_factory, "quickstart", run) / "store"
