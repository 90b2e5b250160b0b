"""A model folder that loads, a cache folder of the test's own, and the devices of tests for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.devices import DEVICES, Device, one_of

from kvdrift.generator.checks.random_models import save_random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", "qwen2")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest or proof of before counts, and none is left on the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with one_of(request.param) as found:
        yield found
