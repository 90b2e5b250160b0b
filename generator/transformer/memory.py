"""Estimate the memory of generation from the model's configuration, and find the available memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.parts import CHUNK
from kvdrift.generator.attention.states import layers_without_attention, state_bytes
from kvdrift.schema.tables import SWRB

# Prompt tokens processed at once: enough for matrix products, and their memory is small beside any model's weights. The
# number does not depend on the memory that is free, since other chunks round differently.
PREFILL_CHUNK = 1024

# Distributions over more tokens than this are float32, and only their sums float64.
DOUBLE_VOCABULARY = 4096

_COLUMNS = 8  # of 16 bits take 16 bytes

# Torch's messages without an OutOfMemoryError: its allocator on a CPU, the driver of a GPU, and cuBLAS.
_SHORTAGE = re.compile("DefaultCPUAllocator: |CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)")

_TRIED_ENTRIES = 1024  # whole steps are tried with a multiple of so many entries
_LITTLE = 2**26  # bytes of suffixes; up to here a trial step has a power of two of streams

_STATES_AT_ONCE = 4  # of a layer, while its recurrent states are updated: before, after, an outer product, its sum

_SHARE = 0.9  # of the available memory; the allocator wastes some of it


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only transformer that determine how much memory it takes."""

    layers: int
    width: int  # of hidden states
    inner_width: int  # of the MLP
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    dtype: str
    windows: tuple[int, ...] = ()  # of each layer that has one, how many positions it sees
    without_attention: int = 0  # layers of a hybrid that have a state in the place of entries
    state_bytes: int = 0  # of all states of a stream
    layer_state_bytes: int = 0  # of the largest states of a layer
    versions: int = 1  # of a stream's states and scores: 2 on a GPU, before and after a step that can be taken back

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str, device: str = "cpu") -> ModelShape:
        """Read the numbers from the contents of ``config.json``; raise KeyError if one is missing."""
        heads, states = int(config["num_attention_heads"]), state_bytes(config, DTYPES[dtype].itemsize)
        return cls(
            layers=int(config["num_hidden_layers"]),
            width=int(config["hidden_size"]),
            inner_width=inner_width(config, config.get("num_experts_per_tok")),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocabulary=int(config["vocab_size"]),
            dtype=dtype,
            windows=_windows(config),
            without_attention=layers_without_attention(config),
            state_bytes=sum(layers * size for layers, size in states),
            layer_state_bytes=max((size for layers, size in states if layers), default=0),
            versions=1 if torch.device(device).type == "cpu" else 2,
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPES[self.dtype].itemsize

    @property
    def evictable_layers(self) -> int:
        """The layers whose entries can be evicted: those with full attention."""
        return self.layers - self.without_attention - len(self.windows)

    @property
    def entry_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return (self.layers - self.without_attention) * self._layer_entry_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the keys and values of one token in the layers whose entries can be evicted."""
        return self.entry_bytes - len(self.windows) * self._layer_entry_bytes

    def fixed_bytes(self, entries: int) -> int:
        """Bytes that no action evicts, after ``entries`` tokens: entries of sliding-window layers, and states."""
        held = sum(min(entries, window - 1) for window in self.windows)
        return held * self._layer_entry_bytes + self.state_bytes

    @property
    def _layer_entry_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_size * self.item_bytes

    @property
    def activation_bytes(self) -> int:
        """Approximate bytes of one token in a layer: hidden states, the MLP (partly float32), queries."""
        attention = 4 * (self.heads + self.kv_heads) * self.head_size
        return (attention + 6 * self.width + 3 * self.inner_width) * self.item_bytes + 8 * self.inner_width

    @property
    def probabilities_bytes(self) -> int:
        """Bytes of one distribution."""
        return padded_vocabulary(self.vocabulary) * (8 if self.vocabulary <= DOUBLE_VOCABULARY else 4)

    @property
    def distribution_bytes(self) -> int:
        """Bytes of one stream's logits and distribution, and of a second copy of the logits if their dtypes differ.

        Logits are in the dtype of the weights, or in float32 if a study requests it; the larger total is returned.
        """
        probabilities, columns = self.probabilities_bytes, padded_vocabulary(self.vocabulary)
        logits = [columns * item for item in (self.item_bytes, 4)]
        return probabilities + max(size if size == probabilities else size + probabilities for size in logits)

    def partial_bytes(self, entries: int) -> int:
        """Return the bytes of one stream's partial results of attention in one layer.

        For each chunk of a prompt and each head there are an output and a float32 sum.
        """
        return -(-entries // CHUNK) * self.heads * (self.head_size * self.item_bytes + 4)

    def score_bytes(self, entries: int) -> int:
        """Return the bytes of a stream's float32 scores in all layers, plus those of one layer's attention weights."""
        return 4 * entries * (self.versions * self.layers * self.kv_heads + 3 * self.heads)

    def decoding_bytes(
        self, pairs: Sequence[int], entries: int, horizon: int, estimator: str, scored: int = 0, *,
        reference: bool = True, tried: bool = False,
    ) -> int:  # fmt: skip
        """Return the most bytes that decoding takes besides a prompt of n = ``entries`` entries.

        ``pairs`` has the number of pairs of each action.

        Coupled rollouts have one reference stream for each replicate, and two streams for each pair. Residual
        branching has a reference stream for each pair, and keeps the two streams of its scan. Where no kernel compares
        distributions in place, a pair has copies of both and their difference. Where a policy keeps scores of
        ``scored`` prompt entries, every stream has room for them.

        ``reference``: whether this model decodes the reference's streams, too; an action's own weights do not.
        ``tried``: whether to count the trial of steps (``try_steps``): its further streams, and one layer of entries.
        """
        total = sum(pairs)
        streams, kept = 2 * total, 2 * total if estimator == SWRB else 0
        if reference:
            streams += total if estimator == SWRB else max(pairs, default=1)
        trial = 0
        if tried:
            streams = tried_streams(streams, horizon, self.entry_bytes)
            # Of a prompt, a copy of it, and half of one.
            trial = 5 * tried_entries(entries) * self.entry_bytes // (2 * self.layers)
        suffix = self.entry_bytes * horizon + self.versions * self.state_bytes
        suffix += self.score_bytes(scored + horizon) if scored else 0
        step = self.activation_bytes + self.partial_bytes(entries) + _STATES_AT_ONCE * self.layer_state_bytes
        stream = suffix + self.distribution_bytes + step
        return streams * stream + kept * suffix + total * 3 * self.probabilities_bytes + trial


def tried_streams(streams: int, horizon: int, entry_bytes: int) -> int:
    """Return the number of streams with which ``try_steps`` tries steps before ``streams`` streams are decoded.

    It is rounded up to a power of two if that takes little memory, since later documents may have more streams.
    """
    rounded_up = 1 << (streams - 1).bit_length()
    return rounded_up if rounded_up * horizon * entry_bytes <= _LITTLE else streams


def tried_entries(entries: int) -> int:
    """Return the number of prompt entries with which ``try_steps`` tries steps for a prompt of ``entries`` entries."""
    return -(-entries // _TRIED_ENTRIES) * _TRIED_ENTRIES


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    size = config.get("sliding_window")
    return tuple(int(size) for kind in config.get("layer_types") or () if kind == "sliding_attention" and size)


def inner_width(config: Mapping[str, Any], experts: int | None) -> int:
    """Return the inner width of an MLP, or of ``experts`` experts plus the experts that all tokens share."""
    if not experts:
        return int(config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    return int(config.get("moe_intermediate_size") or config["intermediate_size"]) * int(experts) + shared


def padded_vocabulary(vocabulary: int) -> int:
    """Return how many columns a row of logits has on a GPU, where a row is padded to a multiple of 16 bytes."""
    return -(-vocabulary // _COLUMNS) * _COLUMNS


def replicates_within(free_bytes: int, replicate_bytes: int) -> int:
    """Return how many replicates are decoded at once in ``free_bytes``; at least 1."""
    return max(int(_SHARE * free_bytes) // replicate_bytes, 1)


def available_bytes(device: str) -> int:
    """Return the bytes that can be allocated on a GPU, or by this process within its control groups' limits."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_machine_bytes(), *_control_group_bytes()])


def is_memory_shortage(error: Exception) -> bool:
    """Return whether an error is for lack of memory: of a GPU, of this machine, or of a library."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _SHORTAGE.search(str(error)) is not None


def _machine_bytes() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_bytes() -> Iterator[int]:
    """Yield the bytes that each control group's limit leaves; page cache that would be given up counts as free."""
    try:
        groups = [line.split(":", 2)[1:] for line in OWN_GROUPS.read_text("ascii").splitlines()]
    except OSError:
        return
    for controller, group in groups:
        if controller in _CONTROL_FILES:
            limit, usage, pages = _CONTROL_FILES[controller]
            root = GROUPS / controller
            for folder in {root / group.lstrip("/"), root}:  # inside a container its own group is the root
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                    counts = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
                    left = int((folder / limit).read_text("ascii")) - int((folder / usage).read_text("ascii"))
                    yield left + int(counts[pages])


OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# The control files of cgroups of version 2, whose controller has no name, and of version 1.
_CONTROL_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
