"""The bookkeeping of slots: whatever is selected, parked and rewound, every stream finds its own suffix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdrift.generator.attention.shared_prefix import StreamSlots

STREAMS, HORIZON = 12, 9


def tensor(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk(seed: int) -> None:
    """Suffixes of one number an entry; each pass takes in streams that were parked, also just before."""
    random = np.random.default_rng(seed)
    slots, buffer = StreamSlots(STREAMS), torch.full((3 * STREAMS, HORIZON), -1)
    known: list[list[int]] = []  # histories of the open streams
    parked: list[list[int]] = []
    for _ in range(3):
        if random.random() < 0.5:
            slots.rewind()
            known = []
        else:
            slots.open([0] * 5)
            known = [[] for _ in range(5)]
        for t in range(HORIZON - 1):
            if random.random() < 0.8:
                usable = list(range(len(known)))
                usable += [len(known) + i for i, history in enumerate(parked) if len(history) >= t]
                rows = random.choice(usable, size=random.integers(0, STREAMS + 1)).tolist() if usable else []
                before = slots.slots.tolist()
                changed = slots.select(tensor(rows))
                assert changed == (rows != list(range(len(known))))
                assert sorted(slots.slots.tolist()) == list(range(len(rows)))
                first = {row: at for at, row in reversed(list(enumerate(rows)))}
                kept = [at for row, at in first.items() if row < len(before) and before[row] < len(rows)]
                assert [int(slots.slots[at]) for at in kept] == [before[rows[at]] for at in kept], "they stay"
                known = [list([*known, *parked][row][:t]) for row in rows]
            if known:
                source, target, length = slots.copies()
                buffer[target, :length] = buffer[source, :length]
                assert len(set(target.tolist())) == len(target)
                tokens = random.integers(0, 1000, len(known)).tolist()
                buffer[slots.slots, t] = tensor(tokens)
                known = [[*history, token] for history, token in zip(known, tokens, strict=True)]
            slots.length += 1
            assert buffer[slots.slots, : t + 1].tolist() == known
            if known and len(parked) < 2 * STREAMS - 2 and random.random() < 0.3:
                rows = random.choice(len(known), size=2).tolist()
                places = random.choice(len(parked) + 2, size=2, replace=False)
                parked += [[]] * (int(places.max()) + 1 - len(parked))
                slots.park(tensor(rows), torch.from_numpy(places))
                for row, place in zip(rows, places, strict=True):
                    parked[place] = known[row]
