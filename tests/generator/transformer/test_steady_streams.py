"""Streams of caches with steady rules: wherever they fork, park and go on, each has the scores of its own history."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from kvdrift.generator.actions import build_action
from kvdrift.generator.checks.random_models import VOCABULARY, random_document, random_model
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.transformer.prompts.streams import TransformerStreams
from kvdrift.schema.study import ActionSection

STREAMS, HORIZON, LENGTH = 8, 16, 60


def kernels_of(sharing: SharingOptions) -> TransformerStreams:
    """Streams of a prompt, and of a cache of each policy, which drops entries after four tokens."""
    actions = [
        build_action(ActionSection(name=name, policy={"name": name}, keep=LENGTH + 4))
        for name in ("h2o", "tova", "sliding")
    ]
    model = random_model("llama")
    with model.computing():
        prepared = model.prepare(random_document("d", LENGTH), actions, HORIZON)
        return prepared.kernels(STREAMS, sharing, parked=2 * STREAMS)


class Walk:
    """Random streams of plain and of steady steps, which are compared, with the same parked streams."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.plain, self.steady = kernels_of(SHARE_ALL), kernels_of(SharingOptions(fused=True))
        self.caches: list[int] = []  # of each open stream
        self.parked: list[tuple[int, int]] = []  # the cache and the length of each parked stream
        self.begun: torch.Tensor | None = None  # the tokens of a step that is begun
        self.found = torch.empty(0)  # the distributions of the last steady step
        self.happened: Counter[str] = Counter()

    def tokens(self) -> torch.Tensor:
        """Random tokens, one for each open stream."""
        return torch.from_numpy(self.random.integers(0, VOCABULARY, len(self.caches)))

    def select(self, length: int) -> None:
        """Fork or close streams, and continue up to three of those that were parked at this length."""
        old = [(cache, row) for row, cache in enumerate(self.caches)]
        back = [(cache, len(old) + at) for at, (cache, its) in enumerate(self.parked) if its == length][:3]
        forked = [old[at] for at in self.random.integers(0, len(old), self.random.integers(1, 6))] if old else []
        self.happened["continued"] += len(back)
        self.caches, rows = zip(*sorted([*forked, *back]), strict=True) if forked or back else ([], [])
        for kernels in (self.plain, self.steady):
            kernels.select(torch.tensor(rows, dtype=torch.int64))

    def step(self, length: int) -> None:
        """Feed a token to the streams that then have ``length`` tokens, and compare distributions."""
        stays = bool(self.caches) and self.random.random() < 0.7
        accepts = self.begun is not None and stays and self.random.random() < 0.6
        self.happened["confirmed"] += accepts
        tokens = self.begun if accepts and self.begun is not None else self.tokens()
        if not accepts:
            self.give_up()
        if not stays:
            self.select(length - 1)
            tokens = self.tokens()
        expected, self.begun = self.plain.advance(tokens), None
        if not self.caches:
            self.steady.advance(tokens)
            return
        if not accepts:
            self.steady.place(tokens)
            self.found = self.steady.distributions()[: len(tokens)].clone()
        self.steady.confirm()
        torch.testing.assert_close(self.found, expected, rtol=1e-4, atol=1e-6)
        if length < HORIZON - 1 and self.random.random() < 0.8:
            self.begun = self.tokens()
            self.steady.feed(self.begun)
            self.found = self.steady.distributions()[: len(tokens)].clone()

    def park(self, length: int) -> None:
        """Park an open stream of ``length`` tokens, in place of another one or beside the others."""
        row, place = (int(self.random.integers(count)) for count in (len(self.caches), len(self.parked) + 1))
        self.parked[place : place + 1] = [(self.caches[row], length)]
        for kernels in (self.plain, self.steady):
            kernels.park(torch.tensor([row]), torch.tensor([place]))
        self.happened["parked meanwhile"] += self.begun is not None

    def give_up(self) -> None:
        """Give up a step that is begun."""
        if self.begun is not None:
            self.steady.give_up()
            self.happened["given up"] += 1
        self.begun = None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.by_default("1")
def test_a_random_walk(seed: int) -> None:
    """Steps are begun and given up, or confirmed; streams are parked meanwhile, and continued in later passes."""
    walk = Walk(seed)
    with torch.inference_mode():
        for kernels in (walk.plain, walk.steady):
            walk.caches = [0, 1, 1, 2, 3]
            kernels.open(walk.caches)
        for _ in range(4):
            for length in range(1, HORIZON):
                walk.step(length)
                if walk.caches and len(walk.parked) < 2 * STREAMS and walk.random.random() < 0.5:
                    walk.park(length)
            walk.give_up()
            walk.caches = []
            for kernels in (walk.plain, walk.steady):
                kernels.rewind()
    assert min(walk.happened[what] for what in ("confirmed", "given up", "continued", "parked meanwhile")) > 2
