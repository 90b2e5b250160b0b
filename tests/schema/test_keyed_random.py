"""The random streams of the project: recorded first numbers, which no change may alter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import synthetic_study
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.coupling.rollout import uniform_table
from kvdrift.generator.documents.source import DocumentDraws
from kvdrift.generator.embedded import documents as embedded
from kvdrift.generator.finite.system import mixture_system
from kvdrift.generator.selectors.random_entries import RandomEntries
from kvdrift.schema.keyed_random import keyed_generator
from kvdrift.stats.clusters import ClusterDraws


@pytest.mark.parametrize(
    ("name", "counter", "recorded"),
    [
        ('[7, "doc", "act"]', 0, [0.7371042558473607, 0.9423521533140038, 0.44139744782108614]),
        ('[7, "doc", "act"]', 3 << 64, [0.9618428211404654, 0.455364583770978, 0.5214320821556031]),
        ("ruler\N{NULL}1\N{NULL}x", 0, [0.2773314725156838, 0.2014653542488417, 0.46926238806568854]),
    ],
)
def test_numbers_of_a_name_and_counter(name: str, counter: int, recorded: list[float]) -> None:
    assert keyed_generator(name, counter).random(3).tolist() == recorded


def test_uniforms_of_the_coupling() -> None:
    """The uniforms of residual branching; those of coupled rollouts are in tests/generator/coupling."""
    recorded = [0.3920969184204742, 0.2586171092798767, 0.9643041641634151]
    assert uniform_table(7, "doc", None, [2], 1, 3, "swrb").tolist() == [[recorded]]


def test_draws_of_generated_documents() -> None:
    assert DocumentDraws("ruler", 1, "x")._random.random(2).tolist() == [0.2773314725156838, 0.2014653542488417]
    assert embedded.named_stream("kvdrift", "needle", 5).random(2).tolist() == [0.641544713429013, 0.45603278899899247]


def test_distributions_of_finite_systems() -> None:
    system = mixture_system(3, "s", 1, 2, 2, 1, ["a"])
    np.testing.assert_allclose(system.reference[0], [[0.5622650311695765, 0.43773496883042357]], rtol=1e-14)
    np.testing.assert_allclose(system.actions["a"][0], [[0.47623083321038673, 0.5237691667896133]], rtol=1e-14)


def test_events_of_the_synthetic_study() -> None:
    assert synthetic_study._generator(5, "a", "b").random(2).tolist() == [0.053984396572890225, 0.5697401047914288]


def test_scores_of_random_entries() -> None:
    layer = PromptLayer(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4), torch.zeros(2, 4, 4), 1.0, number=1, prompt=b"ab")
    assert RandomEntries(seed=5).score(layer).tolist() == [
        [0.11278933891659992, 0.5123684376689269],
        [0.05890653594105677, 0.09774152624397348],
    ]


def test_bootstrap_draws() -> None:
    draws = ClusterDraws(np.array(["s"] * 5), np.array(list("abcde")))
    assert draws.counts(9, 0, 2).tolist() == [[2, 1, 1, 0, 1], [1, 1, 1, 0, 2]]
    assert draws.counts(9, 4, 6).tolist() == [[0, 1, 1, 0, 3], [0, 1, 1, 1, 2]]
