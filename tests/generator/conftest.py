"""A model folder that loads, and a cache folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdrift.generator.checks.random_models import save_random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", "qwen2")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest or proof of before counts, and none is left on the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
