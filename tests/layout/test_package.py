"""The distribution's metadata: packages, data files, and required libraries."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from fixtures.house import PACKAGES, ROOT

import kvdrift
from kvdrift import interfaces

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Imported where they are installed, and said in one line where they are not: extras, what comes with CUDA, a server's own.
OPTIONAL = {"accelerate", "dask", "distributed", "gguf", "kvpress", "triton", "vllm"}


# To read it so takes a tenth of the time that a parser takes; of texts that look like an import it reads too many.
IMPORT = re.compile(r"^[ \t]*(?:import ([\w., ]+)|from (\w+)[\w.]* import )", re.MULTILINE)


def imported() -> set[str]:
    """Names of the libraries that the packages import, anywhere in their code."""
    names: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for plain, source in IMPORT.findall(path.read_text(encoding="utf-8")):
                names |= {name.split()[0].partition(".")[0] for name in plain.split(",") if name} | {source}
    return names - {""} - set(sys.stdlib_module_names) - {"kvdrift"} - OPTIONAL


def test_every_library_that_is_imported_is_declared() -> None:
    declared = (re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["project"]["dependencies"])
    assert imported() - {name for one in declared for name in installed_by(one)} == set()


def test_the_wheel_has_every_package() -> None:
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"] == {
        name: f"kvdrift/{name}" for name in (*PACKAGES, "studies") if name != "kvdrift"
    }


def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """As in the folder that holds a clone."""
    (tmp_path / "kvdrift" / "kvdrift").mkdir(parents=True)
    program = "import kvdrift; print(kvdrift.open.__name__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "open\n"


def test_interfaces_are_those_that_kvdrift_names() -> None:
    assert set(interfaces.__all__) < set(kvdrift.__all__)
    assert all(getattr(kvdrift, name) is not None for name in kvdrift.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Selektor'"):
        kvdrift.Selektor  # noqa: B018


def installed_by(declared: str) -> set[str]:
    """The names that a distribution's files have at the top of the folder of libraries."""
    return {path.parts[0].partition(".")[0] for path in distribution(declared).files or ()}
