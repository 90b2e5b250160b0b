"""Streams of a finite-state system: the distributions that stand in its tables, whatever is selected, parked and rewound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fixtures.random_systems import History, table_distribution

from kvdrift.generator.coupling.streams import StreamDecoder
from kvdrift.generator.finite.model import FiniteStreams
from kvdrift.generator.finite.system import FiniteSystem, mixture_system

Streams = list[tuple[str | None, History]]  # action (None: the reference) and history of every stream
ACTIONS = ["one", "other", "one"]  # as asked for together: an action may recur
CACHES: list[str | None] = [None, *ACTIONS]


def system_of(eos: History = ()) -> FiniteSystem:
    drawn = mixture_system(4, "s", 1, 1, 3, 5, ["one", "other"])
    return FiniteSystem("s", 3, 5, drawn.reference, drawn.actions, eos)


def matches(system: FiniteSystem, distributions: torch.Tensor, streams: Streams) -> bool:
    """Bitwise: distributions are looked up, not computed."""
    expected = [table_distribution(system, action, history) for action, history in streams]
    return distributions.dtype == torch.float64 and distributions.tolist() == expected


def tensor(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("eos", [(), (1,)])
def test_a_random_walk(seed: int, eos: History) -> None:
    """Two passes to the horizon drop, repeat and park streams, and take over streams parked in the pass before."""
    system = system_of(eos)
    random = np.random.default_rng(seed)
    kernels: StreamDecoder = FiniteStreams(system, ACTIONS)
    assert kernels.vocabulary_size == 3
    assert kernels.eos_tokens == eos
    assert kernels.device == "cpu"
    caches = sorted(random.integers(0, 4, size=6).tolist())
    distributions = kernels.open(caches)
    streams: Streams = [(CACHES[cache], ()) for cache in caches]
    parked: Streams = []
    assert matches(system, distributions, streams)
    for _ in range(2):
        for t in range(1, 5):
            if random.random() < 0.7:
                known = [*streams, *((action, history[: t - 1]) for action, history in parked)]
                usable = [row for row, (_, history) in enumerate(known) if len(history) == t - 1]
                rows = sorted(
                    random.choice(usable, size=random.integers(0, 8)).tolist() if usable else [],
                    key=lambda row: CACHES.index(known[row][0]),
                )
                kernels.select(tensor(rows))
                streams = [known[row] for row in rows]
            tokens = random.integers(0, 3, size=len(streams)).tolist()
            distributions = kernels.advance(tensor(tokens))
            streams = [(action, (*history, token)) for (action, history), token in zip(streams, tokens, strict=True)]
            assert distributions.shape == (len(streams), 3)
            assert matches(system, distributions, streams)
            if streams and random.random() < 0.5:
                rows = random.choice(len(streams), size=2).tolist()
                places = random.choice(len(parked) + 2, size=2, replace=False)
                parked += [(None, ())] * (int(places.max()) + 1 - len(parked))
                kernels.park(tensor(rows), torch.from_numpy(places))
                for row, place in zip(rows, places, strict=True):
                    parked[place] = streams[row]
        kernels.rewind()
        streams = []
