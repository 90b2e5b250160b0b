"""Reading documents, finite-state systems and asking a service load neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "prefect", "apache_beam", "duckdb")


@pytest.mark.parametrize(
    "module",
    [
        "generator.documents.registry",
        "generator.embedded.documents",
        "generator.finite.study_systems",
        "generator.service.dispatch",
    ],
)
def test_what_a_module_imports(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
