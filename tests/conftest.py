"""The order of tests, the imports that test processes share, and a network that is closed for mistyped model ids."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["fixtures.browser"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The files that take longest come first, so that workers end together. Of the first two, one makes the finished study,
# which others wait for. It is also the first of those that fork processes, and takes a worker with them.
FORKING = (
    "flows/test_study.py", "generator/service/test_service.py", "transforms/test_pipeline.py",
    "flows/cluster/test_cluster.py", "transforms/test_runners.py",
)  # fmt: skip
LONG = (
    "verification/test_verification.py", "flows/test_object_storage.py", "flows/test_weights_study.py",
    "report/test_report.py", "generator/test_hidden_inputs.py", "faults/test_damage.py",
    "flows/test_engine_study.py", "sql/test_exact_truth.py", "flows/test_identities.py", "log/test_rewriting.py",
    "kvdrift/test_gate.py", "flows/test_sequential.py", "report/test_explorer_page.py", "ingestion/test_ingestion.py",
    "flows/test_server_study.py", "flows/test_analysis.py",
    "stats/test_coverage.py", "flows/test_edits.py", "log/test_many_writers.py",  # long among the slow tests
    "benchmarks/test_benchmarks.py", "stats/test_document_coverage.py", "stats/test_unbiased.py",
    "stats/test_sequential_coverage.py", "generator/transformer/test_forecasts.py", "stats/test_equivalence.py",
    "transforms/test_streams.py", "flows/test_scores.py", "website/test_readme.py", "flows/cluster/test_commands.py",
    "kvdrift/test_upkeep.py",
)  # fmt: skip

# The tests of these files are spread over workers: some take ten minutes, and they share nothing.
APART = ("stats/test_coverage.py", "flows/test_edits.py", "generator/transformer/test_forecasts.py")


def pytest_configure(config: pytest.Config) -> None:
    """Let a process that runs tests import the shared modules; a process that only distributes tests needs none."""
    if config.getoption("dist", "no") == "no":
        gc.set_threshold(10_000, *gc.get_threshold()[1:])  # as kvdrift.program has it: imports make a million objects
        config.pluginmanager.import_plugin("fixtures.finished_studies")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark the cases of a test that the default run leaves out as slow; each name of ``by_default`` needs a case."""
    made = yield
    named: set[str] = set()
    found: set[str] = set()
    for item in made if isinstance(made, list) else []:
        if mark := item.get_closest_marker("by_default"):
            names = {item.callspec.id, *map(str, item.callspec.params.values())}
            if names.isdisjoint(mark.args):
                item.add_marker("slow")
            named.update(mark.args)
            found |= names
    if named - found:
        message = f"by_default names {sorted(named - found)}, which {made[0].originalname} has no case of"
        raise pytest.UsageError(message)
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    order = {Path(__file__).parent / name: place for place, name in enumerate((*FORKING, *LONG))}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Distribute whole files over workers, one file by its tests, and keep the files that fork processes together."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - the hook is xdist's own

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            name = file.removeprefix("tests/")
            if name in APART:
                return nodeid
            return "forking" if name in FORKING else file

    return Scheduling(config, log)
