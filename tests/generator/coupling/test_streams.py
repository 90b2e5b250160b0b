"""Shared work: events are equal to the bit with and without it, and it saves work."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV
from fixtures.table_kernels import CASES, Case, TableKernels, actions_for, rollout

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.rollout import CoupledSteps, uniform_table
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions, distinct_streams
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Recent
from kvdrift.generator.transformer.prompts.document import PreparedPrompt
from kvdrift.log.store import Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import SWRB

SHARE_NOTHING = SharingOptions(share_streams=False, share_prompt_reads=False)

HORIZON, COUNT = 12, 12
MOST = Action("recent-90", "recent", Recent(), Retention.parse("90%"))


def pending() -> list[PendingUnit]:
    """Two actions and a control of both estimators, not all with the same replicates."""
    plain = [PendingUnit(HALF_SNAPKV, 0, COUNT), PendingUnit(MOST, 2, COUNT - 6), PendingUnit(CONTROL, 0, 2)]
    return plain + [replace(unit, estimator=SWRB) for unit in plain]


@cache
def units(kind: str, dtype: str, sharing: SharingOptions = SHARE_ALL) -> list[Unit]:
    """Return units of a prompt that reaches both forms of the CPU's attention: 300 entries, of which 150 and 270 are kept."""
    document = random_document("d300", 300)
    return generate_units(random_model(kind, dtype), "s", document, pending(), HORIZON, 3, sharing)


def assert_same_events(one: list[Unit], other: list[Unit]) -> None:
    for unit, twin in zip(one, other, strict=True):
        assert unit.events.equals(twin.events)
        for name in ("action", "estimator", "first_replicate", "replicates", "pair_evaluations", "kept_sha256"):
            assert unit.record[name] == twin.record[name]


MODELS = pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", "float32"), ("qwen2", "bfloat16"), pytest.param("qwen3", "float32", marks=pytest.mark.slow)],
)


@MODELS
@pytest.mark.by_default("llama-float32")
def test_savings_leave_events_as_they_are(kind: str, dtype: str) -> None:
    """Models have rows that do not depend on other rows."""
    assert random_model(kind, dtype).batch_deviation == 0.0
    assert_same_events(units(kind, dtype, SHARE_NOTHING), units(kind, dtype))


@pytest.mark.parametrize("at_once", [3, pytest.param(1, marks=pytest.mark.slow)])
@MODELS
@pytest.mark.by_default("llama-float32-3")
def test_splitting_replicates_changes_nothing(
    kind: str, dtype: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many replicates there is room for, events are the same, and so are their records but for costs."""
    monkeypatch.setattr(PreparedPrompt, "replicates_at_once", lambda *_: at_once)
    document = random_document("d300", 300)
    assert_same_events(
        generate_units(random_model(kind, dtype), "s", document, pending(), HORIZON, 3), units(kind, dtype)
    )


# --- On systems whose distributions are tables ---------------------------------------------------------------------------------


def run(case: Case, sharing: SharingOptions) -> tuple[TableKernels, list[CoupledSteps]]:
    kernels, replicates = TableKernels(case), range(500)
    reference = uniform_table(5, "doc", None, replicates, case.horizon, 1)
    return kernels, rollout(
        kernels, actions_for(replicates, case.horizon), replicates, reference, case.horizon, sharing
    )


@pytest.mark.parametrize("sharing", [SHARE_NOTHING, SharingOptions(fused=True)], ids=["nothing", "fused"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_savings_leave_rollouts_as_they_are(case: Case, sharing: SharingOptions) -> None:
    """Most histories of 500 replicates are equal here, and many end."""
    for steps, twin in zip(run(case, sharing)[1], run(case, SHARE_ALL)[1], strict=True):
        for name in ("x_token", "y_token", "delta", "f", "x_eos", "y_eos", "kl", "kl_own"):
            np.testing.assert_array_equal(getattr(steps, name), getattr(twin, name))
        known = ~np.isnan(twin.kl)
        assert np.array_equal(steps.top1[known], twin.top1[known])
        assert steps.pair_evaluations == twin.pair_evaluations


# --- Equal streams ----------------------------------------------------------------------------------------------------


def test_distinct_streams() -> None:
    """Equal streams become one, in ascending order of cache; each wanted stream finds its own."""
    random = np.random.default_rng(2)
    cache, row, token, label = (torch.from_numpy(random.integers(0, high, 200)) for high in (3, 2, 4, 2))
    found = distinct_streams(cache, row, token, label)
    wanted = list(zip(cache.tolist(), row.tolist(), token.tolist(), label.tolist(), strict=True))
    streams = list(zip(found.cache.tolist(), found.row.tolist(), found.token.tolist(), strict=True))
    assert len(streams) == len(set(wanted))
    assert found.cache.tolist() == sorted(found.cache.tolist())
    assert [streams[place] for place in found.place.tolist()] == [one[:3] for one in wanted]
    same_place = {
        place: {one for one, at in zip(wanted, found.place.tolist(), strict=True) if at == place}
        for place in range(len(streams))
    }
    assert all(len(ones) == 1 for ones in same_place.values())
    assert found.share.tolist() == [1 / wanted.count(one) for one in wanted]
