"""Couplings that do not wait for the device, compared with those from copies of the distributions; and the transfer of rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from fixtures.distributions import large_distributions
from fixtures.pretend_device import SECOND, TwoDevices

from kvdrift.generator.coupling.distributions import (
    ABSORBED,
    NOTHING,
    DistributionTable,
    block_sums,
    draw,
    fused_draws,
    fused_fault,
    pair_sums,
)
from kvdrift.generator.coupling.steps import StepIndices

ABSENT = 17


@pytest.mark.parametrize(("size", "dtype"), [(900, torch.float32), (40, torch.float64), (512, torch.float32)])
def test_tokens_and_distances_are_those_of_copies(size: int, dtype: torch.dtype) -> None:
    """Bit for bit on a CPU: equal distributions, ended sides and pairs of which nothing is wanted among them."""
    distributions = large_distributions(size, 6, dtype)
    distributions[3] = distributions[2]
    random = np.random.default_rng(size)
    reference = torch.from_numpy(random.integers(0, 8, 60))
    own = torch.from_numpy(random.integers(ABSORBED, 6, 8))
    p, q = own[reference], torch.from_numpy(random.integers(ABSORBED, 6, 60))
    other = torch.from_numpy(random.integers(ABSORBED, 6, 60))
    u = torch.from_numpy(random.random(8 + 120))
    rows = torch.stack([torch.cat([torch.full_like(own, NOTHING), p, p]), torch.cat([own, q, other])])
    found = fused_draws(distributions, rows, u, reference, ABSENT)
    assert found.dtype == torch.float64
    x, y, distance, forced, divergence, forced_divergence, top1 = torch.split(found, [8, *[60] * 6])
    table = DistributionTable(distributions, ABSENT)
    wanted = table.draw(own, u[:8])
    wanted_y = table.couple(p, q, wanted[reference], u[68:], u[8:68])
    wanted_distance, wanted_divergence = table.compare(p, q)
    assert torch.equal(x.long(), wanted)
    assert torch.equal(y.long(), wanted_y)
    assert torch.equal(distance, wanted_distance)
    assert torch.equal(divergence, wanted_divergence)
    for one, wanted in zip((forced, forced_divergence), table.compare(p, other), strict=True):
        assert torch.equal(one, wanted)
    assert bool(divergence.isinf().any()), "an ended side can draw one token alone"
    along, going = torch.where(other == ABSORBED, q, other), (p >= 0) & (torch.where(other == ABSORBED, q, other) >= 0)
    assert torch.equal(top1.bool()[going], (distributions.argmax(-1)[p] == distributions.argmax(-1)[along])[going])
    assert not distance[p == q].any()
    assert not divergence[p == q].any()
    assert bool((x[own == ABSORBED] == ABSENT).all())


def test_some_pairs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions = large_distributions(900, 6, torch.float32)
    rows = torch.tensor([[NOTHING, 0, ABSORBED, 4], [5, 0, 1, ABSORBED]])
    whole = pair_sums(distributions, rows, ABSENT)
    monkeypatch.setattr("kvdrift.generator.coupling.distributions._FUSED_BYTES", 2 * distributions[0].nbytes)
    assert torch.equal(pair_sums(distributions, rows, ABSENT), whole)
    assert torch.equal(whole[1, 0], block_sums(distributions[5]))
    assert not whole[:, 1].any()
    u = torch.tensor([0.3])
    assert torch.equal(
        draw(distributions[5:], u), fused_draws(distributions, rows[:, :1], u, rows[0, :0], ABSENT).long()
    )


def test_vectors_of_a_step_go_to_each_device_at_once() -> None:
    """Few at first, then more than there was room for; a CPU uses them as they are."""
    cpu = torch.device("cpu")
    with TwoDevices():
        indices = StepIndices([cpu, SECOND])
        for count in (2, 3, 40, 1):
            vectors = {"a": torch.arange(count), "none": torch.arange(0), "b": torch.arange(2 * count).view(2, count)}
            sent = indices.send(vectors)
            for name, vector in vectors.items():
                assert sent[cpu][name] is vector
                assert sent[SECOND][name].device == SECOND
                assert torch.equal(sent[SECOND][name].cpu(), vector)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_machine_that_cannot_build_the_kernel_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        message = "Failed to find C compiler. Please specify via CC environment variable."
        raise RuntimeError(message)

    monkeypatch.setattr("kvdrift.generator.coupling.fused_sums.pair_sums", broken)
    assert fused_fault.__wrapped__(torch.device("cpu")) == (
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    )
