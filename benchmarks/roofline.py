"""The bound of steps per second: the least bytes and products of a decoding step, and the measured speed of the device.

A step cannot take less time than its bytes at the rate of a large copy, nor less than its products at the rate of a
large product. Smaller work is left out: norms, rotation, the bookkeeping of streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvdrift.generator.attention.cpu_products import has_product, product
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.transformer.footprint import matrix_bytes
from kvdrift.generator.transformer.memory import ModelShape

_REPETITIONS = 8
# Bytes that are copied, and the rows of a square product: larger than a processor's caches.
_CPU_SIZES, _GPU_SIZES = (2**28, 1024), (2**30, 8192)
_LAW_BYTES = 4  # of a probability, float32


@dataclass(frozen=True)
class Peaks:
    """The measured peaks of a device: of a large copy, read and written, and of a product in the weights' dtype."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class StepWork:
    """The least work of a step, by parts: weights, prompts, suffixes of mean length and, of bytes, logits."""

    bytes: dict[str, float]  # moved
    products: dict[str, float]  # floating-point operations

    def seconds(self, peaks: Peaks) -> float:
        """Return the least time that a device can take."""
        moved, computed = (sum(parts.values()) for parts in (self.bytes, self.products))
        return max(moved / peaks.bytes_per_second, computed / peaks.flops_per_second)

    def facts(self) -> dict[str, dict[str, float]]:
        """Return all parts, in GB and in TFLOP."""
        return {
            "gigabytes": {name: _short(value / 1e9) for name, value in self.bytes.items()},
            "teraflop": {name: _short(value / 1e12) for name, value in self.products.items()},
        }


def step_work(
    shape: ModelShape, entries: Sequence[int], streams: Sequence[float], suffix: float, pairs: float
) -> StepWork:
    """Return the least work of a step.

    Args:
        shape: The shape of a model whose head and embedding are two tensors.
        entries: Prompt entries of each cache, the reference's first.
        streams: Open streams of each cache.
        suffix: Mean length of their suffixes.
        pairs: Pairs (action, replicate) that are coupled; each compares two laws for delta and two for f.
    """
    item, count = shape.item_bytes, sum(streams)
    # The embedding is left out: a step reads its tokens' rows.
    weights = matrix_bytes(shape, tables=1)
    logits = count * (2 * item + _LAW_BYTES)  # a logit is written and read, a probability written
    drawn = streams[0] + 4 * pairs  # laws that are read again
    attention = 4 * shape.layers * shape.heads * shape.head_size  # operations of a query and an entry, in all layers
    return StepWork(
        {
            "weights": weights, "prompts": shape.entry_bytes * sum(entries),
            "suffixes": shape.entry_bytes * suffix * count,
            "logits": shape.vocabulary * (logits + _LAW_BYTES * drawn),
        },
        {
            "weights": 2 * count * weights / item,
            "prompts": attention * sum(m * own for m, own in zip(entries, streams, strict=True)),
            "suffixes": attention * suffix * count,
        },
    )  # fmt: skip


def measure_peaks(device: str, dtype: str, threads: int) -> Peaks:
    """Measure the peaks of a device; a CPU uses ``threads`` threads."""
    torch.set_num_threads(threads)
    on_cpu = torch.device(device).type == "cpu"
    count, size = _CPU_SIZES if on_cpu else _GPU_SIZES
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _least_seconds(device, lambda: target.copy_(source))
    left, right = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    by_onednn = on_cpu and dtype == "float32" and has_product()
    multiplying = _least_seconds(device, lambda: product(left, right) if by_onednn else left @ right.t())
    return Peaks(2 * source.nbytes / copying, 2 * size**3 / multiplying)


def _least_seconds(device: str, call: Callable[[], object]) -> float:
    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(_REPETITIONS):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
