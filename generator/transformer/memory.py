"""How much memory generation takes, and what is done at once so that it fits.

Everything here follows from the model's configuration, so it can be asked before a model is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from schema.tables import SWRB

# Prompt tokens processed at once: enough for matrix products, little beside any model's weights. It is the same
# whatever memory happens to be free, since other chunks round differently.
PREFILL_CHUNK = 1024

# Up to this many tokens laws are float64; above it float32: their sums are still float64 (generator.coupling.laws).
DOUBLE_VOCABULARY = 4096

_SHARE = 0.9  # of the available memory that is planned with; the rest is for what the allocator wastes


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that memory depends on."""

    layers: int
    width: int  # of hidden states
    inner_width: int  # of the MLP
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    dtype: str

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str) -> ModelShape:
        """By a configuration as in ``config.json``; KeyError where a number is missing."""
        heads = int(config["num_attention_heads"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            width=int(config["hidden_size"]),
            inner_width=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocabulary=int(config["vocab_size"]),
            dtype=dtype,
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        item: torch.dtype = getattr(torch, self.dtype)
        return item.itemsize

    @property
    def entry_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.item_bytes

    @property
    def activation_bytes(self) -> int:
        """About what one token takes while a layer computes it: hidden states, the MLP (partly float32), queries."""
        attention = 4 * (self.heads + self.kv_heads) * self.head_size
        return (attention + 6 * self.width + 3 * self.inner_width) * self.item_bytes + 8 * self.inner_width

    @property
    def law_bytes(self) -> int:
        """One stream's logits and law."""
        return self.vocabulary * (self.item_bytes + (8 if self.vocabulary <= DOUBLE_VOCABULARY else 4))

    def replicate_bytes(self, actions: int, horizon: int, estimator: str) -> int:
        """What decoding one replicate of each of ``actions`` takes at most, above the prompt.

        Coupled rollouts have a reference, and per action streams along X and Y; residual branching has a reference for
        every action, and keeps the two streams of its scan.
        """
        streams, kept = (3 * actions, 2 * actions) if estimator == SWRB else (1 + 2 * actions, 0)
        suffix = self.entry_bytes * horizon
        return streams * (suffix + self.law_bytes + self.activation_bytes) + kept * suffix


@dataclass(frozen=True)
class MemoryPlan:
    """What is done at once, and what it takes in bytes; weights not included."""

    replicates: int
    replicates_at_once: int
    prompt_bytes: int  # the whole prompt and the caches of all actions
    prefill_bytes: int  # above the prompt, while a chunk is processed
    replicate_bytes: int  # above the prompt, for each replicate at once
    available_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return self.prompt_bytes + max(self.prefill_bytes, self.replicates_at_once * self.replicate_bytes)

    @property
    def fits(self) -> bool:
        """Whether that is available."""
        return self.peak_bytes <= self.available_bytes

    def __str__(self) -> str:
        return (
            f"{self.replicates_at_once} of {self.replicates} replicates and {PREFILL_CHUNK} prompt tokens at once: "
            f"{self.peak_bytes / 2**30:.2f} GiB above the weights, {self.available_bytes / 2**30:.2f} GiB available"
        )


def plan_memory(
    shape: ModelShape,
    entries: int,
    kept: Sequence[int],
    replicates: int,
    horizon: int,
    available_bytes: int,
    estimator: str,
) -> MemoryPlan:
    """Plan one document: n = ``entries``, the kept entries m of each action, K = ``replicates``, H = ``horizon``.

    ``available_bytes`` are those left beside the weights. At least one replicate is planned; ``MemoryPlan.fits`` says
    whether there is room for it.
    """
    prompt = shape.entry_bytes * (entries + sum(kept))
    replicate = shape.replicate_bytes(len(kept), horizon, estimator)
    return MemoryPlan(
        replicates=replicates,
        replicates_at_once=min(replicates, replicates_within(available_bytes - prompt, replicate)),
        prompt_bytes=prompt,
        prefill_bytes=min(entries, PREFILL_CHUNK) * shape.activation_bytes,
        replicate_bytes=replicate,
        available_bytes=available_bytes,
    )


def replicates_within(free_bytes: int, replicate_bytes: int) -> int:
    """How many replicates are decoded at once in so many bytes; at least one."""
    return max(int(_SHARE * free_bytes) // replicate_bytes, 1)


def available_bytes(device: str) -> int:
    """Memory that can still be taken: of a GPU, or of this machine and the control groups that the process runs in."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_machine_bytes(), *_control_group_bytes()])


def _machine_bytes() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_bytes() -> Iterator[int]:
    """What each memory limit leaves, counting as free the files' pages that would be given up."""
    try:
        groups = [line.split(":", 2)[1:] for line in _OWN_GROUPS.read_text("ascii").splitlines()]
    except OSError:
        return
    for controller, group in groups:
        if controller in _CONTROL_FILES:
            limit, usage, pages = _CONTROL_FILES[controller]
            root = _GROUPS / controller
            for folder in {root / group.lstrip("/"), root}:  # inside a container its own group is the root
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                    counts = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
                    left = int((folder / limit).read_text("ascii")) - int((folder / usage).read_text("ascii"))
                    yield left + int(counts[pages])


_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of version 2, whose controller has no name, and of version 1.
_CONTROL_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
