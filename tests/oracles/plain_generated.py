"""Codecs of generated entries with a real cache for every stream: entries are coded as they leave the window.

Coded entries overwrite the exact entries, which are never read again. Nothing is shared between streams.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracles import plain_codecs
from oracles.plain_codecs import BLOCKS, FORMATS, TURBOQUANT, Numbers, Stored, fp8_scale, group_back, known_numbers
from oracles.plain_generator import softmax
from scipy.linalg import hadamard
from transformers import DynamicCache

BITS = {"int8": 8, "int4": 4, "int2": 2, "rotated-int4": 4}


@dataclass
class PlainCoder:
    """A codec's name, its group and its window; "blurred" goes halfway to a group's mean, and has no ties.

    ``format`` and ``scale`` are fp8's.
    """

    kind: str
    group: int = 32
    residual: int = 0
    format: str = "e4m3"
    scale: str = "head"
    scales: dict[tuple[int, str], list[np.float32]] = field(default_factory=dict)  # those of the prompt, for each head

    @property
    def together(self) -> int:
        """How many keys are coded together."""
        return self.group if self.kind in {"int8", "int4", "int2", "blurred"} else 1

    def coded(self, part: Numbers, layer: int, name: str) -> Numbers:
        """Read back some entries, [KV heads, entries, size]: a group of keys, or one entry."""
        if self.kind == "nvfp4":
            return plain_codecs.nvfp4_back(part, self.scales[layer, name][0], Stored())
        if self.kind in BLOCKS:
            return plain_codecs.blocks_back(part, self.kind, Stored())
        if self.kind in TURBOQUANT:
            return plain_codecs.turboquant(part, part, self.kind)[0 if name == "keys" else 1]
        read = part.copy()
        heads, entries, size = part.shape
        for head in range(heads):
            if self.kind == "fp8":
                read[head] = _fp8(part[head], self.scales[layer, name][head], self.format)
            elif name == "keys" and self.together > 1:
                for channel in range(size):
                    read[head, :, channel] = self._group(part[head, :, channel])
            elif self.kind != "identity":
                matrix = hadamard(size) / np.sqrt(size) if self.kind == "rotated-int4" else np.eye(size)
                for entry in range(entries):
                    turned = (part[head, entry].astype(np.float64) @ matrix).astype(np.float32)
                    groups = [self._group(turned[at : at + self.group]) for at in range(0, size, self.group)]
                    read[head, entry] = np.concatenate(groups).astype(np.float64) @ matrix
        return read

    def _group(self, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.kind == "blurred":
            return (numbers + numbers.mean()) / 2
        return np.array(group_back(list(numbers), BITS[self.kind], Stored(bits=[[]])), dtype=np.float32)

    def see(self, part: Numbers, layer: int, name: str) -> None:
        """Take the scales of a prompt."""
        if self.kind == "nvfp4":
            self.scales[layer, name] = [plain_codecs.nvfp4_scale(part)] * len(part)
        else:
            self.scales[layer, name] = [fp8_scale(head if self.scale == "head" else part, self.format) for head in part]


def _fp8(numbers: Numbers, scale: np.float32, form: str) -> Numbers:
    known = known_numbers(*FORMATS[form][0])
    wanted = np.minimum(np.abs(numbers / scale), known[-1])
    apart = np.abs(known - wanted[..., None])
    odd = np.arange(len(known)) % 2 * 1e-9  # of two equally near numbers the even one
    return (np.sign(numbers) * known[(apart + odd).argmin(-1)] * scale).astype(np.float32)


class CodedStream:
    """A cache of a prompt's kept entries, followed along one history; without a coder all entries are exact.

    Args:
        kept: For each layer the kept positions, [KV heads, m]; None for all.
    """

    def __init__(
        self, network: Any, tokens: Sequence[int], coder: PlainCoder | None, kept: Sequence[Any] | None = None
    ) -> None:
        self._network, self._coder, self._cache = network, coder, DynamicCache()
        self._next = len(tokens)
        with torch.no_grad():
            output = network(torch.tensor([list(tokens)]), past_key_values=self._cache)
        self.first_distribution = softmax(output.logits[0, -1])
        self._done = [{"keys": 0, "values": 0} for _ in self._cache.layers]
        for number, layer in enumerate(self._cache.layers):
            for name in ("keys", "values"):
                if kept is not None:
                    part, rows = getattr(layer, name)[0], torch.as_tensor(np.array(kept[number])).long()
                    setattr(layer, name, torch.stack([head[own] for head, own in zip(part, rows, strict=True)])[None])
                if coder is not None:
                    coder.see(getattr(layer, name)[0].numpy(), number, name)
        self._leave()

    def fork(self) -> CodedStream:
        """Another stream at the same place."""
        twin = copy.copy(self)
        twin._cache, twin._done = copy.deepcopy(self._cache), copy.deepcopy(self._done)
        return twin

    def advance(self, token: int) -> NDArray[np.float64]:
        """Feed a token and return the next distribution."""
        self._leave()
        ids = torch.tensor([[token]])
        with torch.no_grad():
            output = self._network(
                ids, past_key_values=self._cache, position_ids=torch.full_like(ids, self._next),
                attention_mask=torch.zeros(1, 1, 1, 1),  # to everything, however many entries a layer has
            )  # fmt: skip
        self._next += 1
        return softmax(output.logits[0, -1])

    def _leave(self) -> None:
        """Code the entries that have left the window."""
        coder = self._coder
        if coder is None:
            return
        for number, (layer, done) in enumerate(zip(self._cache.layers, self._done, strict=True)):
            for name, step in (("keys", coder.together), ("values", 1)):
                part = getattr(layer, name)[0].numpy()  # the cache's own memory
                while done[name] + step + coder.residual <= part.shape[1]:
                    own = slice(done[name], done[name] + step)
                    part[:, own] = coder.coded(part[:, own], number, name)
                    done[name] += step
