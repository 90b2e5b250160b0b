"""What only a GPU can show; `python -m pytest -m gpu` runs it on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_near
from fixtures.laws import large_laws
from fixtures.random_models import random_document, save_random_model

from generator.coupling.laws import LawTable
from generator.generation import PendingUnit, generate_units
from generator.transformer.loading import load_model
from schema.store.store import Unit
from schema.tables import PLAIN, SWRB

pytestmark = pytest.mark.gpu


def units(folder: Path, device: str, dtype: str) -> list[Unit]:
    """Both estimators, a control beside them, and laws of 5,000 tokens."""
    model = load_model(str(save_random_model(folder / device, "llama", vocab_size=5000)), device=device, dtype=dtype)
    pending = [PendingUnit(HALF_SNAPKV, 0, 12, estimator) for estimator in (PLAIN, SWRB)] + [PendingUnit(CONTROL, 0, 2)]
    return generate_units(model, "s", random_document("d1500", 1500), pending, 16, 3)


def test_events_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Kernels round by some 1e-6 in float32; tokens are equal unless a uniform falls as near to a boundary."""
    for one, other in zip(units(tmp_path, "cuda", "float32"), units(tmp_path, "cpu", "float32"), strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_control_is_exactly_zero(dtype: str, tmp_path: Path) -> None:
    control = next(unit for unit in units(tmp_path, "cuda", dtype) if unit.record["action"] == "full")
    assert not np.any(control.events["delta"].to_numpy())
    assert not np.any(control.events["f"].to_numpy())


def test_sums_of_pairs_in_one_pass() -> None:
    """The Triton kernel against sums of copies, within float32's rounding; bitwise equal laws are not apart at all."""
    laws = large_laws(10_007, 6, torch.float32)
    random = np.random.default_rng(4)
    left, right = torch.from_numpy(random.integers(-1, 6, (2, 40)))
    right[0] = left[0]
    u = torch.from_numpy(random.random((40, 3)))
    fused, plain = LawTable(laws.cuda(), 17), LawTable(laws, 17)
    x = plain.draw(left, u[:, 0])
    y, distance = fused.couple(left, right, x.cuda(), u[:, 1:].cuda())
    wanted_y, wanted = plain.couple(left, right, x, u[:, 1:])
    assert torch.equal(y.cpu(), wanted_y)
    assert (distance.cpu() - wanted).abs().max() < 2e-7
    assert (fused.distance(left, right).cpu() - wanted).abs().max() < 2e-7
    assert float(distance[0]) == 0.0
