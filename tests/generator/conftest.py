"""A model folder that loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdrift.generator.checks.random_models import save_random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", "qwen2")
