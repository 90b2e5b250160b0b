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

# The files that take longest come first, so that workers end together. Tests of the first file make the finished
# study. Tests of many files wait for that study, but not tests of the next few files. The first file is also the first
# of those that fork processes, and these run in one worker.
FORKING = (
    "flows/test_study.py", "generator/service/test_service.py", "transforms/test_pipeline.py",
    "flows/cluster/test_cluster.py", "transforms/test_runners.py",
)  # fmt: skip
LONG = (
    "generator/selectors/test_part_matrix.py", "generator/test_families.py", "sql/test_exact_truth.py",
    "ingestion/test_ingestion.py", "verification/test_verification.py", "faults/test_damage.py",
    "report/test_page_in_browser.py", "report/test_report.py", "report/test_explorer_page.py",
    "generator/engines/test_servers.py", "generator/test_step_profile.py", "generator/test_hidden_inputs.py",
    "flows/test_analysis.py", "ingestion/test_inputs.py", "generator/transformer/test_proof.py",
    "generator/test_interpreted_kernels.py", "log/test_rewriting.py", "generator/transformer/test_gguf_folders.py",
    "kvdrift/test_status.py", "flows/test_transformers_study.py", "flows/test_server_study.py",
    "flows/test_python_run.py", "flows/test_edits.py", "log/test_many_writers.py",
    # long among the slow tests
    "stats/test_coverage.py", "benchmarks/test_benchmarks.py", "stats/test_document_coverage.py",
    "stats/test_unbiased.py", "stats/test_sequential_coverage.py", "generator/transformer/test_forecasts.py",
    "stats/test_equivalence.py", "website/test_site.py",
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
