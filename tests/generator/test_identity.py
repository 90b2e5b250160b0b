"""A selector's fingerprint follows its source and parameters, and nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.refusals import refused

from kvdrift.generator.identity import selector_sha256, source_of
from kvdrift.generator.selectors import SELECTORS, Selector, SnapKV, build_selector

OWN = """
from dataclasses import dataclass
from typing import ClassVar

from kvdrift.generator.selectors.selector import ScoringSelector
from scores import squared


@dataclass(frozen=True)
class Own(ScoringSelector):
    summary: ClassVar[str] = "for a test"
    sharpness: int = 2

    def score(self, layer):
        return squared(layer.key)
"""
SCORES = "import powers\n\ndef squared(key):\n    return powers.of(key, 2).sum(-1)\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Selector]]:
    """Import the selector of a folder anew, as a new process would."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ("own", "scores", "powers", "unused")
    for name, text in (("own", OWN), ("scores", SCORES), ("powers", "of = pow\n"), ("unused", "a = 1\n")):
        (tmp_path / f"{name}.py").write_text(text)

    def loaded() -> Selector:
        for name in names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        made: Selector = importlib.import_module("own").Own()
        return made

    yield loaded
    for name in names:
        sys.modules.pop(name, None)


def test_every_module_beside_it_that_it_imports_counts(load: Callable[[], Selector], tmp_path: Path) -> None:
    selector = load()
    assert [name for name, _ in source_of(type(selector))] == ["own.py", "powers.py", "scores.py", "selector.py"]
    before = selector_sha256(selector)
    assert selector_sha256(load()) == before
    for name, counts in (("own", True), ("scores", True), ("powers", True), ("unused", False)):
        file = tmp_path / f"{name}.py"
        text = file.read_text()
        file.write_text(text + "# edited\n")
        assert selector_sha256(load()) == before
        file.write_text(text + "edited = True\n")
        assert (selector_sha256(load()) != before) == counts, name
        file.write_text(text)
    assert selector_sha256(load()) == before


def test_relative_imports_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "owned" / "selectors"
    package.mkdir(parents=True)
    (tmp_path / "owned" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (tmp_path / "owned" / "common.py").write_text("x = 1\n")
    (package / "near.py").write_text("def squared(key):\n    from owned.common import x\n    return key\n")
    (package / "own.py").write_text(OWN.replace("from scores", "from .near"))
    monkeypatch.syspath_prepend(tmp_path)
    selector = importlib.import_module("owned.selectors.own").Own()
    assert [name for name, _ in source_of(type(selector))] == ["common.py", "near.py", "own.py", "selector.py"]


def test_of_an_installed_distribution_the_version_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    (site / "thirdparty-1.5.dist-info").mkdir(parents=True)
    (site / "thirdparty-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.5\n"
    )
    (site / "thirdparty-1.5.dist-info" / "top_level.txt").write_text("thirdparty\n")
    (site / "thirdparty.py").write_text(OWN.replace("from scores import squared", ""))
    monkeypatch.syspath_prepend(site)
    selector = importlib.import_module("thirdparty").Own()
    assert ("thirdparty", "1.5") in source_of(type(selector))
    assert "thirdparty.py" not in dict(source_of(type(selector)))


def test_parameters_count_and_bases_do(load: Callable[[], Selector]) -> None:
    own = load()
    assert selector_sha256(type(own)(sharpness=3)) != selector_sha256(own)
    hashes = {selector_sha256(build_selector(name, {})) for name in SELECTORS}
    assert len(hashes) == len(SELECTORS)
    assert selector_sha256(SnapKV(window=32)) != selector_sha256(SnapKV()) == selector_sha256(SnapKV())
    assert "snapkv.py" in dict(source_of(SELECTORS["pyramidkv"]))


def test_a_class_without_a_file_is_refused() -> None:
    made = type("Made", (SnapKV,), {"__module__": "nowhere"})
    assert "module 'nowhere' has no source file" in refused(selector_sha256, made())
