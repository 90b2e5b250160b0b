"""Residual branching on transformers: compared with its plain twin, and rules that every scan and branch obeys."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from fixtures.common_actions import CONTROL, HALF_SNAPKV
from oracles.plain_branching import PlainBranch, plain_branching
from oracles.plain_generator import keep_recent, keep_snapkv, load_eager

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import EOS_TOKENS, random_document, random_model, save_random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Recent
from kvdrift.log.units.unit import Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import BRANCH, SCAN, SWRB

SEED, HORIZON, LENGTH, COUNT = 3, 24, 150, 10
RECENT = Action("recent-most", "recent", Recent(), Retention.parse("140/150"))
CHOOSERS = {"snapkv-half": keep_snapkv(75), "recent-most": keep_recent(140)}


def swrb(action: Action, first: int = 0, count: int = COUNT) -> PendingUnit:
    return PendingUnit(action, first, count, SWRB)


def generate(kind: str, *pending: PendingUnit) -> list[Unit]:
    document = random_document(f"d{LENGTH}", LENGTH)
    return generate_units(random_model(kind), "s", document, pending, HORIZON, SEED)


@cache
def units(kind: str) -> dict[str, Unit]:
    made = generate(kind, swrb(HALF_SNAPKV), swrb(RECENT), swrb(CONTROL, count=2))
    return {unit.record["action"]: unit for unit in made}


def rows(unit: Unit, kind: str, replicate: int) -> dict[str, Any]:
    table = unit.events
    chosen = [row for row in table.to_pylist() if row["kind"] == kind and row["replicate"] == replicate]
    return {name: [row[name] for row in chosen] for name in table.column_names}


FIRST = 4  # of the replicates that are compared; two of qwen2-recent-most branch late


@cache
def plain(kind: str, action: str) -> list[PlainBranch]:
    with TemporaryDirectory() as folder:
        network = load_eager(save_random_model(Path(folder), kind))
    document = random_document(f"d{LENGTH}", LENGTH)
    return plain_branching(
        network, document.tokens, CHOOSERS[action],
        seed=SEED, document=document.doc, action=action, replicates=range(FIRST, COUNT), horizon=HORIZON, eos_tokens=EOS_TOKENS,
    )  # fmt: skip


# Both sides compute in float32 along different paths; distributions then differ by some 1e-6 (see test_generator).
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("llama", "recent-most"), ("qwen2", "snapkv-half"), ("llama", "snapkv-half"), ("qwen2", "recent-most"),
    ],
)  # fmt: skip
@pytest.mark.by_default("qwen2-recent-most")
def test_fast_equals_plain(kind: str, action: str) -> None:
    unit = units(kind)[action]
    for replicate, twin in enumerate(plain(kind, action), start=FIRST):
        scan, branch = rows(unit, SCAN, replicate), rows(unit, BRANCH, replicate)
        assert scan["x_token"] == scan["y_token"] == twin.tokens
        assert scan["t"] == list(range(1, HORIZON + 1))
        np.testing.assert_allclose(scan["delta"], twin.deficits, atol=TOLERANCE)
        np.testing.assert_allclose(scan["weight"], twin.weights, atol=TOLERANCE)
        found = [branch[name] for name in ("t", "x_token", "y_token")]
        assert found == [[row[place] for row in twin.branch] for place in range(3)]
        np.testing.assert_allclose(branch["delta"], [row[3] for row in twin.branch], atol=TOLERANCE)
        np.testing.assert_allclose(branch["f"], [row[4] for row in twin.branch], atol=TOLERANCE)


def test_all_that_can_happen_does_happen_here() -> None:
    """Branches early and late, scans with EOS inside, branches whose sides end."""
    starts, ends = set(), []
    for kind in ("llama", "qwen2"):
        for action in CHOOSERS:
            for replicate in range(COUNT):
                starts |= set(rows(units(kind)[action], BRANCH, replicate)["t"][:1])
                ends.append([any(rows(units(kind)[action], part, replicate)["x_eos"]) for part in (SCAN, BRANCH)])
    assert min(starts) == 2  # eviction follows prefill
    assert max(starts) > HORIZON // 2
    scans, branches = zip(*ends, strict=True)
    assert any(scans)
    assert any(branches)


def test_the_control_has_nothing_to_branch_to() -> None:
    events = units("llama")["full"].events
    assert set(events["kind"].to_pylist()) == {SCAN}
    assert not np.any(events["weight"].to_numpy())
    assert not np.any(events["delta"].to_numpy())


@pytest.mark.parametrize("action", ["snapkv-half", "recent-most", "full"])
def test_pair_evaluations_are_what_the_rows_show(action: str) -> None:
    """Scan positions up to U's EOS, and branch positions after J before both sides have ended."""
    unit = units("llama")[action]
    counted = 0
    for replicate in range(unit.record["replicates"]):
        scan, branch = rows(unit, SCAN, replicate), rows(unit, BRANCH, replicate)
        counted += (scan["x_eos"] + [True]).index(True) + any(scan["x_eos"])
        over = [x and y for x, y in zip(branch["x_eos"], branch["y_eos"], strict=True)]
        counted += sum(not before for before in over[:-1])
    assert unit.record["pair_evaluations"] == counted
