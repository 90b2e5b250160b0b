"""Coupled generation with shared prompts, against a copy of the prompt for every replicate.

    python -m benchmarks.generation                                  # n = 1k and 4k, K = 64: about half an hour
    python -m benchmarks.generation --entries 512 --replicates 8 --horizon 8 --json
    python -m benchmarks.generation --entries 16384 --parts shared   # what it takes where copies do not fit
    python -m benchmarks.generation --device cuda --preset llama-8b-32k

Random weights, one random document, three actions: SnapKV and recent keeping half of the prompt, SnapKV keeping 512
entries. Parts, each run in a process of its own, in turn with the others, ``--repetitions`` times:

- ``shared``: this generator;
- ``copies``: K copies of the prompt in transformers' ``DynamicCache``, three streams per action and replicate, sdpa;
- ``in place``: the same with copies in buffers that have room for the horizon from the start.

"all" is the prompt (prefill and eviction) with decoding, "decode" the latter alone. Seconds are the least, ratios those
of the least and, below, of the medians. Where K copies do not fit into memory, as many as do are decoded, the row says
how many, and ratios compare seconds per replicate.

The roofline is a step's least time by bytes and by products (``benchmarks.roofline``), with the control as a fourth
action, at two phases: "start" decodes one replicate, whose few streams are shared as ever; "parted" decodes K with all
streams apart. Each is measured beside the device's own peaks.

The rate is in steps of one pair. On a CPU the peak is that of the process, on CUDA that of device memory, without the
libraries' own. The presets on CUDA have not been measured yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.copied_caches import copied_rollout
from benchmarks.measurement import BenchmarkRow, Measured, benchmark_parser, measure, mib, show
from benchmarks.roofline import Peaks, measure_peaks, step_work
from generator.actions import Action
from generator.attention.cpu_products import replace_activations, replace_linear_layers
from generator.attention.holding import DTYPES
from generator.attention.interface import IMPLEMENTATION
from generator.attention.row_invariance import find_row_multiple
from generator.coupling.streams import ALL_SAVINGS, Savings
from generator.generation import PendingUnit, generate_units
from generator.selectors import Full, Recent, SnapKV
from generator.transformer.decoder import whole_sums
from generator.transformer.footprint import matrix_bytes
from generator.transformer.fused.layers import join_weights, layers_fault
from generator.transformer.memory import ModelShape, available_bytes
from generator.transformer.model import LoadedModel
from generator.transformer.prompts.prompt import Prompt
from schema.document import Document
from schema.retention import Retention

SEED = 3
_FEWEST = 128  # prompt entries, of which SnapKV's window is half


@dataclass(frozen=True)
class Case:
    """A model's shape, and the sizes of the generation."""

    layers: int = 8
    width: int = 512
    inner_width: int = 1408
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 32_000
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    entries: int = 1024
    replicates: int = 64
    horizon: int = 32

    def actions(self) -> list[Action]:
        """Return the three measured actions."""
        half = Retention.parse("1/2")
        return [
            Action("snapkv-half", "snapkv", SnapKV(), half),
            Action("recent-half", "recent", Recent(), half),
            Action("snapkv-512", "snapkv", SnapKV(), Retention(512)),
        ]

    def kept(self) -> list[int]:
        """Return how many prompt entries each action keeps."""
        return [action.retention.kept(self.entries) for action in self.actions()]


PRESETS = {
    "small": (Case(), (1024, 4096)),
    # The shape of Llama-3.1-8B.
    "llama-8b-32k": (Case(32, 4096, 14_336, 32, 8, 128_256, "bfloat16", horizon=128), (32_768,)),
}


@dataclass(frozen=True)
class MeasuredRun:
    """The cost and the tokens of one run.

    Attributes:
        replicates: K, which is smaller if K copies do not fit into memory.
        prompt_seconds: Seconds of prefill and eviction.
        decode_seconds: Seconds of decoding.
        streams: Next-token laws computed per step.
        x_token: The reference's tokens by action, [K, H].
        y_token: The compressed side's tokens by action, [K, H].
        device_peak_bytes: Peak of the device's memory; None on a CPU.
    """

    replicates: int
    prompt_seconds: float
    decode_seconds: float
    streams: float
    x_token: dict[str, NDArray[Any]]
    y_token: dict[str, NDArray[Any]]
    device_peak_bytes: int | None

    @property
    def seconds(self) -> float:
        """Seconds of prompt and decoding."""
        return self.prompt_seconds + self.decode_seconds


RunsByPart = dict[str, list[Measured[MeasuredRun]]]


def random_model(case: Case, *, plain: bool = False) -> LoadedModel:
    """Make a model of random weights on the case's device; ``plain`` leaves the network as transformers makes it."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.width, intermediate_size=case.inner_width,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.kv_heads,
        max_position_embeddings=2 * case.entries + case.horizon, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    loader: Any = AutoModelForCausalLM
    with torch.device(case.device):
        network = loader.from_config(config, dtype=DTYPES[case.dtype], attn_implementation=IMPLEMENTATION)
    network.eval().requires_grad_(requires_grad=False)
    if case.device == "cpu" and not plain:
        replace_activations(network)
        replace_linear_layers(network)
    elif case.device != "cpu" and not plain and layers_fault(network) is None:
        join_weights(network)
    shape = ModelShape.of(config.to_dict(), case.dtype)
    with whole_sums(case.device):
        rows = find_row_multiple(network)
    return LoadedModel("random", network, case.device, case.dtype, (), config.max_position_embeddings, shape, rows)


def random_document(case: Case) -> Document:
    """Make a prompt of random tokens."""
    tokens = np.random.default_rng(SEED).integers(0, case.vocabulary, case.entries)
    return Document("random", "RANDOM", "random", "random", "random", tuple(tokens.tolist()))


def run_shared(case: Case, savings: Savings = ALL_SAVINGS, *, control: bool = False) -> MeasuredRun:
    """Run all actions by the generator, and the control if asked for."""
    model, document = random_model(case), random_document(case)
    actions = [*case.actions(), *([Action("full", "full", Full(), Retention(None))] if control else [])]
    pending = [PendingUnit(action, 0, case.replicates) for action in actions]
    units = generate_units(model, "benchmark", document, pending, case.horizon, SEED, savings)
    columns = {
        name: {
            unit.record["action"]: unit.events[name].to_numpy().reshape(case.replicates, case.horizon) for unit in units
        }
        for name in ("x_token", "y_token")
    }
    prompt, decode, laws = (
        sum(unit.record[name] for unit in units) for name in ("prefill_seconds", "decode_seconds", "kernel_evaluations")
    )
    streams = laws / (case.horizon - 1)
    return MeasuredRun(case.replicates, prompt, decode, streams, **columns, device_peak_bytes=_device_peak(case))


def run_copies(case: Case, *, preallocated: bool) -> MeasuredRun:
    """Run one action after another with copies, in preallocated buffers or in ``DynamicCache``."""
    model, document = random_model(case, plain=True), random_document(case)
    begun = _clock(case)
    prompt = Prompt(model, document.tokens, max(action.selector.window for action in case.actions()))
    prompt_seconds = _clock(case) - begun
    model.network.set_attn_implementation("sdpa")
    steps = {
        action.name: copied_rollout(
            model, prompt, document, action, case.replicates, case.horizon, SEED, preallocated=preallocated
        )
        for action in case.actions()
    }
    return MeasuredRun(
        case.replicates, prompt_seconds, _clock(case) - begun - prompt_seconds, 3.0 * len(steps) * case.replicates,
        {action: tokens for action, (tokens, _) in steps.items()},
        {action: tokens for action, (_, tokens) in steps.items()}, _device_peak(case),
    )  # fmt: skip


def _clock(case: Case) -> float:
    if case.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def _device_peak(case: Case) -> int | None:
    return None if case.device == "cpu" else torch.cuda.max_memory_allocated()


def fitting_copies(case: Case) -> int:
    """Return for how many replicates of one action, at most K, the copies fit into memory."""
    shape = model_shape(case)
    entries = case.entries + 2 * max(case.kept()) + 3 * case.horizon
    growing = 2 * case.entries / case.layers  # a layer's keys and values before and after a token is appended
    room = 0.85 * (available_bytes(case.device) - weight_bytes(case))
    return min(case.replicates, int(room / (shape.entry_bytes * (entries + growing))))


def model_shape(case: Case) -> ModelShape:
    """Return the model's shape as the memory planner reads it."""
    size = case.width // case.heads
    return ModelShape(
        case.layers, case.width, case.inner_width, case.heads, case.kv_heads, size, case.vocabulary, case.dtype
    )


def weight_bytes(case: Case) -> int:
    """Return the bytes of all weights, with both embeddings."""
    return matrix_bytes(model_shape(case), tables=2)


def measure_phase(case: Case, name: str, peaks: Peaks) -> dict[str, Any]:
    """Decode at one phase; return steps per second, their bound, and the least work of a step."""
    replicates = 1 if name == "start" else case.replicates
    savings = ALL_SAVINGS if name == "start" else Savings(share_equal_histories=False, share_until_parting=False)
    run = measure(partial(run_shared, control=True), replace(case, replicates=replicates), savings).value
    entries = [case.entries, *case.kept(), case.entries]
    actions = len(entries) - 1
    compressed = (run.streams - replicates) / actions
    work = step_work(
        model_shape(case), entries, [replicates] + [compressed] * actions, case.horizon / 2, replicates * actions
    )
    steps, bound = (case.horizon - 1) / run.decode_seconds, 1 / work.seconds(peaks)
    return {
        "streams": round(run.streams, 1), "steps_per_second": round(steps, 3), "bound": round(bound, 3),
        "share_of_bound": round(steps / bound, 3), **work.facts(),
    }  # fmt: skip


def roofline(case: Case, runs: RunsByPart) -> dict[str, Any]:
    """Return both phases, the peaks, and the ratio of times for the parted phase's pairs with copies."""
    peaks = measure(measure_peaks, case.device, case.dtype, case.threads).value
    phases = {name: measure_phase(case, name, peaks) for name in ("start", "parted")}
    pairs = case.replicates * (len(case.actions()) + 1)
    for name in (name for name in runs if name != "shared"):
        pair = min(one.value.decode_seconds / one.value.replicates for one in runs[name]) / len(case.actions())
        naive = pair * pairs / (case.horizon - 1)  # seconds of a step
        phases["parted"][f"times_{name.replace(' ', '_')}"] = round(naive * phases["parted"]["steps_per_second"], 2)
    return {
        "copy_gib_per_second": round(peaks.bytes_per_second / 2**30, 2),
        "product_teraflop_per_second": round(peaks.flops_per_second / 1e12, 4), **phases,
    }  # fmt: skip


PARTS: dict[str, Callable[[Case], MeasuredRun]] = {
    "shared": run_shared,
    "copies": partial(run_copies, preallocated=False),
    "in place": partial(run_copies, preallocated=True),
}
PHASES = {"all": attrgetter("seconds"), "decode": attrgetter("decode_seconds")}


def compare(case: Case, parts: Sequence[str], repetitions: int) -> tuple[list[BenchmarkRow], dict[str, Any]]:
    """Measure one prompt length; return rows and facts."""
    copied = replace(case, replicates=max(fitting_copies(case), 1))
    runs: RunsByPart = {name: [] for name in parts}
    for _ in range(repetitions):
        for name in parts:
            runs[name].append(measure(PARTS[name], case if name == "shared" else copied))
    rows = []
    for phase in PHASES:
        for name in parts:
            peers: list[str | None] = [peer for peer in parts if name == "shared" != peer]
            rows += [_row(case, name, phase, runs, peer) for peer in peers or [None]]
    return rows, _facts(case, runs)


def _row(case: Case, name: str, phase: str, runs: RunsByPart, peer: str | None) -> BenchmarkRow:
    seconds = [PHASES[phase](one.value) for one in runs[name]]
    replicates = runs[name][0].value.replicates
    return BenchmarkRow(
        part=f"n = {case.entries}, K = {replicates}, {phase}: {name}", seconds=min(seconds),
        peak_mib=mib(max(one.value.device_peak_bytes or one.peak_bytes for one in runs[name])),
        rate=replicates * len(case.actions()) * (case.horizon - 1) / min(seconds), peer=peer,
        ratio=None if peer is None else _ratio(runs, phase, peer, min),
    )  # fmt: skip


def _ratio(runs: RunsByPart, phase: str, peer: str, of: Callable[[list[float]], float]) -> float:
    """Return how many times as long the peer takes for a replicate."""
    own, others = (
        of([PHASES[phase](one.value) for one in runs[name]]) / runs[name][0].value.replicates
        for name in ("shared", peer)
    )
    return others / own


def _facts(case: Case, runs: RunsByPart) -> dict[str, Any]:
    """Return medians, agreement, bytes and roofline of one prompt length."""
    facts: dict[str, Any] = {
        "repeated_seconds": {
            f"{name}, {phase}": [round(seconds(one.value), 3) for one in found]
            for name, found in runs.items()
            for phase, seconds in PHASES.items()
        },
        "streams_per_step": {name: round(found[0].value.streams, 1) for name, found in runs.items()},
    }
    shape, kept = model_shape(case), case.kept()
    sizes = {
        "weights": weight_bytes(case),
        "prompt_caches": shape.entry_bytes * (case.entries + sum(kept)),
        "suffixes_at_most": shape.entry_bytes * case.horizon * case.replicates * (1 + 2 * len(kept)),
        "copies_for_the_reference_alone": shape.entry_bytes * case.replicates * (case.entries + case.horizon),
    }
    facts["mib"] = {name: round(mib(size)) for name, size in sizes.items()}
    if "shared" in runs:
        shared = runs["shared"][0].value
        peers = [name for name in runs if name != "shared"]
        facts["median_ratio"] = {
            f"{peer}, {phase}": round(_ratio(runs, phase, peer, statistics.median), 2)
            for peer in peers
            for phase in PHASES
        }
        facts["different_tokens"] = {peer: _different_tokens(shared, runs[peer][0].value) for peer in peers}
        mismatches = [shared.x_token[name] != shared.y_token[name] for name in shared.x_token]
        facts["mismatch"] = round(float(np.mean(mismatches)), 3)
        steps = max((case.horizon - 1) / one.value.decode_seconds for one in runs["shared"])
        facts["steps_per_second"] = round(steps, 3)
        facts["roofline"] = roofline(case, runs)
    return facts


def _different_tokens(one: MeasuredRun, other: MeasuredRun) -> int:
    """Count different tokens in the replicates that both runs have; other kernels round differently."""
    count = min(one.replicates, other.replicates)
    return sum(
        int((tokens[action][:count] != others[action][:count]).sum())
        for tokens, others in ((one.x_token, other.x_token), (one.y_token, other.y_token))
        for action in tokens
    )


def main() -> None:
    """Run the benchmark at the given sizes."""
    parser = benchmark_parser("generation", "Measure generation with shared prompts, against copies of the prompt.")
    parser.add_argument("--preset", choices=PRESETS, default="small", help="the model's shape and its sizes")
    parser.add_argument("--entries", type=int, nargs="+", help="prompt lengths n")
    parser.add_argument("--replicates", type=int, help="K")
    parser.add_argument("--horizon", type=int, help="H")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    if options.entries and min(options.entries) < _FEWEST:
        parser.error(f"--entries {min(options.entries)}: give {_FEWEST} or more, for SnapKV's window")
    shape, lengths = PRESETS[options.preset]
    sizes = {name: getattr(options, name) for name in ("replicates", "horizon") if getattr(options, name) is not None}
    case = replace(shape, device=options.device, threads=options.threads, **sizes)
    rows: list[BenchmarkRow] = []
    facts: dict[str, Any] = {"preset": options.preset, "case": asdict(case) | {"entries": options.entries or lengths}}
    for entries in options.entries or lengths:
        some, about = compare(replace(case, entries=entries), options.parts, options.repetitions)
        rows += some
        facts[f"n_{entries}"] = about
    show("generation", rows, "steps", facts, as_json=options.json)


if __name__ == "__main__":
    main()
