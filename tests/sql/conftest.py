"""Fixtures for tests on views: the systems of ``oracles.exact_systems``, measured once for all workers."""

from __future__ import annotations

import pytest
from fixtures.shared import made_once
from oracles.exact_systems import read_measured, write_measured


@pytest.fixture(scope="session")
def exact_systems(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Return all systems, measured now or read from another worker's measurement."""
    read_measured(made_once(tmp_path_factory, "exact_systems", write_measured))
