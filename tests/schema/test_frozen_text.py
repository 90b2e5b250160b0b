"""The text of frozen plans and their hash."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kvdrift.schema.frozen_text import frozen_sha256, frozen_text, with_measured

PLAN: dict[str, Any] = {"replicates": 5, "alpha": 0.05, "cost_curve": [{"replicates": 4}, {"replicates": 5}]}


def measured(seconds: float) -> dict[str, Any]:
    return PLAN | {"measured": {"expected_seconds": seconds, "cost_curve": [{"seconds": seconds}, {"seconds": 2.0}]}}


def test_what_was_measured_is_no_part_of_the_hash() -> None:
    plain = json.dumps(PLAN, sort_keys=True, separators=(",", ":"))
    hashes = {frozen_sha256(frozen_text(measured(seconds))) for seconds in (0.1, 1 / 3)}
    assert hashes == {hashlib.sha256(plain.encode()).hexdigest()}
    assert frozen_sha256(frozen_text(measured(0.1) | {"alpha": 0.1})) not in hashes


@pytest.mark.parametrize("text", ['{"replicates": 3,  "expected_seconds": 1.5}', "3", "not JSON", "[1]"])
def test_what_has_no_measured_part_is_hashed_as_it_stands(text: str) -> None:
    """Plans of older versions keep their hash."""
    assert frozen_sha256(text) == hashlib.sha256(text.encode()).hexdigest()


def test_measured_seconds_at_their_places() -> None:
    placed = with_measured(measured(0.5))
    assert placed == PLAN | {
        "expected_seconds": 0.5,
        "cost_curve": [{"replicates": 4, "seconds": 0.5}, {"replicates": 5, "seconds": 2.0}],
    }
    assert with_measured(placed) == placed
