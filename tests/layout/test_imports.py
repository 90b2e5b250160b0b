"""The structure of the source: import contracts, no circles, few floors, and commands that load only what they use."""

from __future__ import annotations

import graphlib
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.house import PACKAGES, ROOT, put_together
from fixtures.small_study import write_study

from kvdrift.generator.checks.random_models import save_random_model

HEAVY = ("torch", "transformers", "matplotlib")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the packages are inside kvdrift."""
    return put_together(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def imports(together: Path) -> dict[str, set[str]]:
    """Return the package's own modules that each module imports, except imports for type checking alone."""
    program = """
import grimp, json
graph = grimp.build_graph("kvdrift", exclude_type_checking_imports=True, cache_dir=None)
print(json.dumps({module: list(graph.find_modules_directly_imported_by(module)) for module in graph.modules}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=together)
    found = {module: set(imported) for module, imported in json.loads(done.stdout).items()}
    del found["kvdrift"]  # the Python interface imports from all
    return {module: imported - {"kvdrift"} for module, imported in found.items()}


def test_import_contracts(together: Path) -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=together)
    assert done.returncode == 0, done.stdout


def test_no_circle_of_files(imports: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("number", range(2, 5))
def test_no_circle_of_folders(imports: dict[str, set[str]], number: int) -> None:
    """At each depth, imports between sibling folders go in one direction only."""
    graphlib.TopologicalSorter(siblings(imports, number)).prepare()


def test_few_floors_a_folder(imports: dict[str, set[str]]) -> None:
    """A folder has at most six floors, from the module that imports none of its siblings to the top."""
    deepest = max(module.count(".") for module in imports) + 1
    rooms = {name: deps for number in range(3, deepest + 1) for name, deps in siblings(imports, number).items()}
    floors: dict[str, int] = {}
    floor: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(rooms).static_order():
        folder = room.rpartition(".")[0]
        floor[room] = 1 + max((floor[other] for other in rooms[room]), default=0)
        floors[folder] = max(floors.get(folder, 0), floor[room])
    assert {"kvdrift.flows", "kvdrift.generator.attention"} <= floors.keys()
    assert [folder for folder, count in floors.items() if count > 6] == []


def siblings(imports: dict[str, set[str]], number: int) -> dict[str, set[str]]:
    """Return the imports between siblings: modules whose names agree except for part ``number``."""

    def cut(module: str) -> str | None:
        parts = module.split(".")
        return ".".join(parts[:number]) if len(parts) >= number else None

    found: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        if (one := cut(module)) is None:
            continue
        found[one] |= set()
        for other in map(cut, imported):
            if other is not None and other != one and other.rpartition(".")[0] == one.rpartition(".")[0]:
                found[one].add(other)
    return dict(found)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.by_default("False")
def test_commands_load_only_what_they_use(finished: Path, tmp_path: Path, *, whole: bool) -> None:
    """One process calls them, those that load least first; a run that has nothing to do comes last.

    By default those that take a second at most.
    """
    store, finished_run = str(finished), ["run", str(write_study(tmp_path)), "--store", str(finished)]
    unloaded: list[tuple[list[str], tuple[str, ...]]] = [
        (["--help"], (*HEAVY, "numpy", "pyarrow", "duckdb", "scipy", "prefect", "apache_beam", "pydantic")),
        (["list", "views"], HEAVY), (["list", "tasks"], HEAVY), (["status", store], HEAVY),
        (["sql", store, "select count(*) from decomposition"], HEAVY),
        (["sql", store, "select 1 as x", "--format", "latex"], HEAVY),
        (["derive", store], HEAVY), (["analyze", store], HEAVY), (["verify", store], HEAVY),
        ([*finished_run, "--dry-run"], ("transformers", "matplotlib", "prefect")),
        (finished_run, ("transformers", "matplotlib", "prefect")),
    ]  # fmt: skip
    if not whole:
        unloaded = [one for one in unloaded if one[0][0] not in {"analyze", "verify", "run"}]
    loaded = modules_after([command for command, _ in unloaded])
    for (command, libraries), modules in zip(unloaded, loaded, strict=True):
        assert modules.isdisjoint(libraries), command


def test_documents_systems_and_clients_load_no_model() -> None:
    modules = "documents.registry", "embedded.documents", "finite.study_systems", "service.client"
    code = f"import sys, {', '.join(f'kvdrift.generator.{module}' for module in modules)}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {*HEAVY, "prefect", "apache_beam", "duckdb"}.isdisjoint(found.stdout.split())


def modules_after(commands: list[list[str]]) -> list[set[str]]:
    """Run commands, which must succeed; return for each the modules that one process has loaded by then."""
    program = (
        "import json, sys\n"
        "from kvdrift.command import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        main(command)\n"
        "    except SystemExit as stop:\n"
        "        print('\\nloaded', json.dumps([command, stop.code or 0, sorted(sys.modules)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = [
        json.loads(line.removeprefix("loaded ")) for line in done.stdout.splitlines() if line.startswith("loaded ")
    ]
    assert [code for _, code, _ in found] == [0] * len(commands), done.stderr
    return [set(modules) for _, _, modules in found]


@pytest.mark.slow
def test_everything_works_without_docstrings_and_assertions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -OO`` drops both; models load and selectors are listed with their papers all the same.

    The code of transformers looks at docstrings when its models are imported.
    """
    modules = [
        ".".join((*above, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for above, folders in ((("kvdrift",), PACKAGES[:-1]), ((), ("kvdrift", "training", "benchmarks")))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.name
        not in {"__main__.py", "fused_sums.py", "triton_kernels.py", "gguf_files.py", "vllm.py"}  # of other packages
    ]
    folder = save_random_model(tmp_path / "model", "qwen2")
    generation = f"""
from kvdrift.generator.actions import Action
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.schema.document import Document
from kvdrift.schema.retention import Retention

pending = [PendingUnit(Action("full", "full", Full(), Retention(None)), 0, 2)]
units = generate_units(load_model({str(folder)!r}), "s", Document("d", "s", "d", "", "", tuple(range(30))), pending, 4, 3)
print(units[0].events["x_token"].to_pylist(), token_reader({str(folder)!r}))
"""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"{generation}"
        "from kvdrift.command import main\n"
        "main(['list', 'selectors'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-OO", "-c", program, *modules], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    exec(generation, {})  # noqa: S102 - the same with docstrings
    generated, _ = capsys.readouterr()
    assert generated.endswith(" None\n")
    code, listed, err = call(capsys, "list", "selectors")
    assert (code, generated + listed, err) == (0, done.stdout, "")
