"""The copies and launches of a decoding step, counted on the pretended device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from fixtures.families import FAMILIES
from fixtures.pretend_device import SECOND, TwoDevices
from fixtures.step_profile import (
    FAMILY_STEPS,
    PRETEND,
    STEPS,
    Operations,
    StepOperations,
    changed_steps,
    computing_on,
    profile_family,
    profile_steps,
)

from kvdrift.generator.attention.cpu_products import OneDNNLinear
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.schema.tables import PLAIN, SWRB


def counted(*, numbers: torch.Tensor) -> StepOperations:
    """A step that does one of everything to ``numbers``, int64 [4] on the second device."""
    host = torch.arange(4)
    with TwoDevices(), Operations() as operations:
        numbers + numbers  # before the first step
        operations.next_step()
        operations.next_step()
        host + host
        up, down = host.to(SECOND), numbers.cpu()
        numbers.copy_(down)
        torch.empty_like(numbers).view(2, 2)
        numbers[up]
        numbers[numbers > 2]
        numbers[up[:1]] = 7  # a number that CUDA would copy there
        numbers.nonzero()
        numbers[0].item()
        numbers.tolist()
        numbers.double()
    assert operations.steps[0] == StepOperations()
    return operations.steps[1]


def test_every_operation_is_counted_as_what_it_is() -> None:
    with TwoDevices():
        step = counted(numbers=torch.arange(4, device=SECOND))
    assert step.up == {"aten::_to_copy": 1, "aten::copy_": 1, "aten::index_put_": 1}
    assert step.down == {"aten::_to_copy": 2}
    assert step.waiting == {"aten::index": 1, "aten::nonzero": 1, "aten::_local_scalar_dense": 1}
    assert step.copies == 8
    named = ("gt", "scalar_tensor", "index_put_", "nonzero", "_to_copy")
    assert step.launches == {"aten::index": 2} | {f"aten::{name}": 1 for name in named}


def test_a_real_device_has_its_operations_taken_apart() -> None:
    numbers = torch.empty((2, 2), device="meta")
    with computing_on("meta"), Operations() as operations, torch.inference_mode():
        operations.next_step()
        torch.nn.functional.linear(numbers, numbers).to(torch.float64)
    assert operations.steps[0].launches == {"aten::mm": 1, "aten::_to_copy": 1}


profiled = cache(profile_steps)
DEVICES = pytest.mark.parametrize("device", [PRETEND, pytest.param("cuda", marks=pytest.mark.gpu)])


def test_a_step_repeats_another_one_if_all_arguments_do() -> None:
    """A copy that is read later ends a step's calls, and begins those of the next step."""
    with TwoDevices(), Operations() as operations:
        numbers, others = torch.arange(8, device=SECOND), torch.arange(8, device=SECOND)
        operations.next_step()
        for own, first, last in ((numbers, 0, 4), (numbers, 0, 4), (numbers, 1, 5), (numbers, 0, 3), (others, 0, 4)):
            torch.empty(8, dtype=torch.int64).copy_(own, non_blocking=True)
            part = own[first:last]
            operations.next_step(begun=True)
            part.add_(1)
    opened, *begun = operations.steps
    assert not opened.begun
    assert opened.later == {"aten::copy_": 1}
    assert [len(step.recorded.calls) for step in begun] == [2, 2, 2, 2, 2]
    assert [changed_steps([begun[0], step]) for step in begun] == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 1)]
    assert changed_steps(begun) == (2, 1), "another offset, another shape; another address"


@DEVICES
@pytest.mark.parametrize("estimator", [PLAIN, SWRB])
@pytest.mark.by_default(PLAIN)
def test_a_step_exchanges_two_copies_with_the_device(device: str, estimator: str) -> None:
    """Indices go up, tokens and distances come down; nothing else waits, and a layer takes a dozen launches at most."""
    found = profiled(device, estimator, STEPS + 1)
    print(found)  # noqa: T201 - pytest -s shows the counts of a device
    assert found["steps"] >= STEPS
    assert found["copies"] <= 2
    assert (sum(found["up"].values()), sum(found["down"].values()) + sum(found["later"].values())) == (1, 1)
    assert found["waiting"] == {}
    assert found["launches_a_layer"] <= 12


@DEVICES
@pytest.mark.parametrize(("estimator", "buckets"), [(PLAIN, 1), (SWRB, 4)])
@pytest.mark.by_default(PLAIN)
def test_steps_that_keep_their_streams_repeat_each_other(device: str, estimator: str, buckets: int) -> None:
    """Of 32 steps most are begun without an upload or a change of shape, and the host reads their tokens a step later.

    Pairs of coupled rollouts part at once here; branches begin one after the other. Nothing waits in any step, and the
    steps of a bucket use the same memory.
    """
    found = profiled(device, estimator, STEPS + 1)
    assert found["begun"] > STEPS / 2
    assert found["given_up"] < found["begun"] / 4
    assert found["sent_to_begun"] == 0
    assert (found["changed"], found["moved"]) == (0, 0)
    assert found["buckets"] == buckets
    assert found["down"] == found["waiting"] == {}


# The angles of dynamic RoPE are computed again on the host as soon as a text is longer than any before.
NOT_CAPTURED = {"llama-dynamic": {"aten::_local_scalar_dense"}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.by_default("qwen3.5")
def test_steps_of_every_family_are_those_of_a_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One upload and one download a step, no other wait, and in a bucket neither another shape nor another address.

    A bucket has some streams, of which some end; states have two addresses, which steps use in turn.
    """
    monkeypatch.setattr("kvdrift.generator.attention.cpu_products.PackedLinear", OneDNNLinear)  # it cannot move
    found = profile_family(family)
    assert sum(found["up"].values()) <= found["steps"]
    assert sum(found["later"].values()) <= found["steps"]
    assert found["down"] == {}
    assert found["waiting"].keys() == NOT_CAPTURED.get(family, set())
    assert found["begun"] > FAMILY_STEPS / 2
    assert found["given_up"] < found["begun"] / 3
    assert (found["changed"], found["moved"]) == (0, 0)
    assert found["buckets"] <= 4


@DEVICES
@pytest.mark.parametrize("estimator", [PLAIN, SWRB])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.by_default("h2o-plain-pretend")
def test_steps_of_policies_repeat_each_other(device: str, policy: str, estimator: str) -> None:
    """A bucket has one version of the scores, and entries are dropped from the eighth token on, by the same operations.

    A scan parks the streams of a position in the step that is begun after it, which takes one more upload. Streams of a
    policy that keeps no scores go back to what they were, and need none.
    """
    found = profiled(device, estimator, STEPS + 1, policy)
    print(found)  # noqa: T201 - pytest -s shows the counts of a device
    assert found["begun"] > found["steps"] / 2
    assert found["given_up"] < found["begun"] / 4
    assert found["copies"] <= 2
    assert found["down"] == found["waiting"] == {}
    assert sum(found["up"].values()) <= 1
    assert found["sent_to_begun"] == 0 or (estimator == SWRB and POLICIES[policy].keeps_scores)
    assert (found["changed"], found["moved"]) == (0, 0)
    assert found["buckets"] <= 8
