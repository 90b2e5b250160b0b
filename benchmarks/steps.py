"""Time decoding steps before and after pairs diverge, against a bound, and against the steps of another commit.

"before divergence" decodes one replicate, which shares streams as in any run; "after divergence" decodes K replicates,
none of which shares a stream. Both decode three actions and the control. Each phase is measured in separate processes,
in turn with the other commit.

The bound is the least time of a step: its bytes at the rate of a large copy, or its matrix products at the rate of a
large one, whichever takes longer. Smaller work is left out: norms, rotation, the bookkeeping of streams.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, model_shape
from kvdrift.generator.attention.cpu_products import has_product, product
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.transformer.footprint import matrix_bytes
from kvdrift.generator.transformer.memory import ModelShape

HERE = Path(__file__).resolve().parent.parent
NAMES = ("before divergence", "after divergence")

# One thread's time is the process's, which other processes on the machine do not lengthen.
_DECODE = """
import json, sys, time
case, apart = json.loads(sys.argv[1])
if case["device"] == "cpu" and case["threads"] == 1:
    time.perf_counter = time.process_time
from benchmarks.generation import Case, run_shared
from kvdrift.generator.coupling.streams import SharingOptions
sharing = SharingOptions(share_equal_histories=not apart, share_until_divergence=not apart)
run = run_shared(Case(**case), sharing, control=True)
print(json.dumps([run.decode_seconds, run.streams]))
"""

REPETITIONS = 8
# Bytes that are copied, and the rows of a square product: larger than a processor's caches.
CPU_SIZES, GPU_SIZES = (2**28, 1024), (2**30, 8192)
_LAW_BYTES = 4  # of a probability, float32


@dataclass(frozen=True)
class Peaks:
    """A device's measured peak rates: of a large copy, in bytes, and of a large matrix product, in operations."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class StepWork:
    """The least work of a decoding step, by part: weights, prompts, suffixes, and logits, which have only bytes."""

    bytes: dict[str, float]  # moved
    products: dict[str, float]  # floating-point operations

    def seconds(self, peaks: Peaks) -> float:
        """Return the least seconds that a device with these peak rates can take for the work."""
        moved, computed = (sum(parts.values()) for parts in (self.bytes, self.products))
        return max(moved / peaks.bytes_per_second, computed / peaks.flops_per_second)


def step_work(
    shape: ModelShape, entries: Sequence[int], streams: Sequence[float], suffix: float, pairs: float
) -> StepWork:
    """Return the least work of a step of a model whose head and embedding are two tensors.

    ``entries`` and ``streams`` are the prompt entries and the open streams of each cache, the reference's first, and
    ``suffix`` the mean number of generated entries of a stream. Each of ``pairs`` compares two distributions for delta
    and two for f.
    """
    item, count = shape.item_bytes, sum(streams)
    # The embedding is left out: a step reads its tokens' rows.
    weights = matrix_bytes(shape, tables=1)
    logits = count * (2 * item + _LAW_BYTES)  # a logit is written and read, a probability written
    drawn = streams[0] + 4 * pairs  # distributions that are read again
    attention = 4 * shape.layers * shape.heads * shape.head_size  # operations of a query and an entry, in all layers
    return StepWork(
        {
            "weights": weights, "prompts": shape.entry_bytes * sum(entries),
            "suffixes": shape.entry_bytes * suffix * count,
            "logits": shape.vocabulary * (logits + _LAW_BYTES * drawn),
        },
        {
            "weights": 2 * count * weights / item,
            "prompts": attention * sum(m * stream_count for m, stream_count in zip(entries, streams, strict=True)),
            "suffixes": attention * suffix * count,
        },
    )  # fmt: skip


def measure_peaks(device: str, dtype: str, threads: int) -> Peaks:
    """Measure the peak rates of a device, in copying and in matrix products; a CPU uses ``threads`` threads."""
    torch.set_num_threads(threads)
    on_cpu = torch.device(device).type == "cpu"
    count, size = CPU_SIZES if on_cpu else GPU_SIZES
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
    for _ in range(REPETITIONS):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


@dataclass(frozen=True)
class Phase:
    """The measured steps of one phase."""

    name: str  # one of ``NAMES``
    replicates: int
    steps_per_second: float  # of all pairs together
    before: float | None  # the same of the other commit, if one is measured
    streams: float  # the mean number of open streams
    bound: float  # the most steps per second

    @property
    def share(self) -> float:
        """The measured steps per second as a share of the bound."""
        return self.steps_per_second / self.bound

    def facts(self) -> dict[str, Any]:
        """Return the facts of the phase that its rows do not have: streams and bound."""
        return {"streams": round(self.streams, 1), "bound": round(self.bound, 3)}


def measure_phase(case: Case, name: str, peaks: Peaks, before: Path | None, repetitions: int) -> Phase:
    """Measure the decoding of phase ``name``, also with the code of tree ``before``; the fastest repetition counts."""
    case = replace(case, replicates=1 if name == NAMES[0] else case.replicates)
    seconds: dict[Path, list[float]] = {tree: [] for tree in (HERE, before) if tree is not None}
    streams = 0.0
    for _ in range(repetitions):
        for tree, timings in seconds.items():
            took, streams = _decode(tree, case, apart=name == NAMES[1])
            timings.append(took)
    rates = [(case.horizon - 1) / min(timings) for timings in seconds.values()]
    bound = 1 / _work(case, streams).seconds(peaks)
    return Phase(name, case.replicates, rates[0], rates[1] if before else None, streams, bound)


def _decode(tree: Path, case: Case, *, apart: bool) -> tuple[float, float]:
    """Decode with a working tree's code, sharing no streams if ``apart``; return the seconds, and streams per step."""
    command = [sys.executable, "-c", _DECODE, json.dumps([asdict(case), apart])]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise SystemExit(f"decoding with the code of {tree} failed:\n{ended.stderr}")
    seconds, streams = json.loads(ended.stdout)
    return seconds, streams


def _work(case: Case, streams: float) -> StepWork:
    """Return the least work of a step with ``streams`` open streams, of the case's actions and the control."""
    entries: Sequence[int] = [case.entries, *case.kept(), case.entries]
    actions = len(entries) - 1
    compressed = (streams - case.replicates) / actions
    each = [case.replicates] + [compressed] * actions
    return step_work(model_shape(case), entries, each, case.horizon / 2, case.replicates * actions)
