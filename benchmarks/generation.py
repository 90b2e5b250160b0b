"""Measure coupled generation with shared prompts, against a copy of the prompt for every replicate.

    python -m benchmarks.generation                                  # n = 1k and 4k, K = 64: about half an hour
    python -m benchmarks.generation --entries 512 --replicates 8 --horizon 8 --json
    python -m benchmarks.generation --entries 16384 --parts shared   # if copies do not fit into memory
    python -m benchmarks.generation --device cuda --preset llama-8b-32k

A model of random weights decodes one random document under three actions: SnapKV and recent keeping half of the prompt,
and SnapKV keeping 512 entries. Parts take turns, each run in a separate process:

- ``shared``: kvdrift's own generator;
- ``copies``: K copies of the prompt in transformers' ``DynamicCache``, three streams per action and replicate,
  attention by sdpa;
- ``before divergence`` and ``after divergence``: the generator's steps of one replicate, which shares streams as in any
  run, and of K replicates, none of which shares a stream; both with the control beside the three actions.

Rows "all" time the prompt (prefill and eviction) and decoding together. Seconds are the least of the repetitions; the
rate is in steps of one pair. If K copies do not fit into memory, as many as fit are decoded, and ratios compare seconds
per replicate. The peak is resident memory on a CPU, device memory on CUDA.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache

from benchmarks.cases import PRESETS, SEED, Case, model_shape, random_document, random_model
from benchmarks.measurement import BenchmarkRow, Measured, Measurement, benchmark_parser, measure, mib, run
from kvdrift.generator.actions import Action
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.coupling.distributions import couple, draw, total_variation
from kvdrift.generator.coupling.rollout import uniform_table
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.generator.transformer.footprint import matrix_bytes
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.generator.transformer.memory import available_bytes
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.document import Document
from kvdrift.schema.retention import Retention

_FEWEST = 128  # prompt entries, of which SnapKV's window is half


@dataclass(frozen=True)
class MeasuredRun:
    """The cost and the tokens of one run."""

    replicates: int  # K, which is smaller if K copies do not fit into memory
    prompt_seconds: float  # prefill and eviction
    decode_seconds: float
    streams: float  # next-token distributions computed per step
    tokens: NDArray[np.int64]  # of X and Y, [actions, 2, K, H]
    device_peak_bytes: int | None  # None on a CPU

    @property
    def seconds(self) -> float:
        """Seconds of prompt and decoding."""
        return self.prompt_seconds + self.decode_seconds


RunsByPart = dict[str, list[Measured[MeasuredRun]]]


def run_shared(case: Case, sharing: SharingOptions = SHARE_ALL, *, control: bool = False) -> MeasuredRun:
    """Run all actions, and with ``control`` the full-retention control, by kvdrift's own generator."""
    model, document = random_model(case), random_document(case)
    actions = [*case.actions(), *([Action("full", "full", Full(), Retention(None))] if control else [])]
    pending = [PendingUnit(action, 0, case.replicates) for action in actions]
    units = generate_units(model, "benchmark", document, pending, case.horizon, SEED, sharing)
    tokens = np.array([[unit.events[name].to_numpy() for name in ("x_token", "y_token")] for unit in units], np.int64)
    prompt, decode, distributions = (
        sum(unit.record[name] for unit in units) for name in ("prefill_seconds", "decode_seconds", "kernel_evaluations")
    )
    streams = distributions / (case.horizon - 1)
    tokens = tokens.reshape(len(units), 2, case.replicates, case.horizon)
    return MeasuredRun(case.replicates, prompt, decode, streams, tokens, _device_peak(case))


def run_copies(case: Case) -> MeasuredRun:
    """Run one action after another with copies of the prompt in ``DynamicCache``."""
    model, document = random_model(case, plain=True), random_document(case)
    begun = _clock(case)
    prompt = Prompt(model, document.tokens, max(action.selector.window for action in case.actions()))
    prompt_seconds = _clock(case) - begun
    model.network.set_attn_implementation("sdpa")
    tokens = np.array(
        [copied_rollout(model, prompt, document, action, case.replicates, case.horizon) for action in case.actions()]
    )
    return MeasuredRun(
        case.replicates, prompt_seconds, _clock(case) - begun - prompt_seconds, 3.0 * len(tokens) * case.replicates,
        tokens, _device_peak(case),
    )  # fmt: skip


def expanded_cache(layers: Sequence[PrefixLayer], copies: int) -> Cache:
    """Make a cache of transformers with ``copies`` copies of the entries of ``layers``, one for each replicate."""
    cache = DynamicCache()
    for number, layer in enumerate(layers):
        cache.update(layer.key.expand(copies, -1, -1, -1), layer.value.expand(copies, -1, -1, -1), number)
    return cache


def copied_rollout(
    model: LoadedModel, prompt: Prompt, document: Document, action: Action, replicates: int, horizon: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run one action's coupled rollout; return the tokens of both sides, int64 [K, H] each.

    Each replicate has three streams (reference on X, compressed on Y, compressed on X). Each stream is fed one token a
    position through transformers' caches. Prompt, eviction, uniforms and the coupling are the
    generator's. ``model.network`` attends with sdpa, and its vocabulary has no EOS.
    """
    whole = [PrefixLayer(layer.key, layer.value) for layer in prompt.layers]
    compact = evict(prompt.layers, action.selector, action.retention.kept(prompt.entries)).layers
    reference, on_y, on_x = (expanded_cache(layers, replicates) for layers in (whole, compact, compact))
    tables = [
        uniform_table(SEED, document.doc, name, range(replicates), horizon, purposes)
        for name, purposes in ((None, 1), (action.name, 2))
    ]
    u_x, u_y = (torch.from_numpy(table).to(model.device) for table in tables)

    distribution = prompt.first_distribution.expand(replicates, -1)
    x = y = draw(distribution, u_x[:, 0, 0])
    steps = [(x, y)]
    for column in range(1, horizon):
        position = prompt.entries + column - 1
        p = _law(model, reference, x, position)
        q = _law(model, on_y, y, position)
        total_variation(p, _law(model, on_x, x, position))  # f
        total_variation(p, q)  # delta
        x = draw(p, u_x[:, column, 0])
        y = couple(p, q, x, u_y[:, column, 0], u_y[:, column, 1])
        steps.append((x, y))
    x_tokens, y_tokens = (torch.stack(side, 1).cpu().numpy() for side in zip(*steps, strict=True))
    return x_tokens, y_tokens


def _law(model: LoadedModel, cache: Cache, tokens: Tensor, position: int) -> Tensor:
    with torch.inference_mode():
        output = model.network(
            input_ids=tokens[:, None],
            position_ids=torch.full((1, 1), position, device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
        distribution: Tensor = output.logits[:, -1].softmax(-1, dtype=torch.float32)
    return distribution


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
    room = 0.85 * (available_bytes(case.device) - matrix_bytes(shape, tables=2))
    return min(case.replicates, int(room / (shape.entry_bytes * (entries + growing))))


APART = SharingOptions(share_streams=False)
PARTS: dict[str, Callable[[Case], MeasuredRun]] = {"shared": run_shared, "copies": run_copies}
PHASES: dict[str, Callable[[Case], MeasuredRun]] = {
    "before divergence": partial(run_shared, control=True),
    "after divergence": partial(run_shared, sharing=APART, control=True),
}
TIMED = {"seconds": "all", "decode_seconds": "decode"}


def compare(case: Case, parts: Sequence[str], repetitions: int) -> Measurement:
    """Measure ``parts``, and steps before and after divergence, at the case's prompt length; return rows and facts."""
    fewer = {"copies": max(fitting_copies(case), 1), "before divergence": 1}
    cases = {name: replace(case, replicates=replicates) for name, replicates in fewer.items()}
    calls = {name: (PARTS | PHASES)[name] for name in (*parts, *PHASES)}
    rounds = [{name: measure(call, cases.get(name, case)) for name, call in calls.items()} for _ in range(repetitions)]
    runs: RunsByPart = {name: [measured[name] for measured in rounds] for name in calls}
    rows = [_row(case, name, timed, runs) for timed in TIMED for name in parts]
    for name in PHASES:
        pairs = runs[name][0].value.replicates * (len(case.actions()) + 1)
        step = min(run.value.decode_seconds for run in runs[name]) / (case.horizon - 1)
        part = f"n = {case.entries}, K = {runs[name][0].value.replicates}, a step {name}"
        rows.append(BenchmarkRow(part, step, rate=pairs / step))
    return rows, {f"n_{case.entries}": _facts(case, runs)}


def _row(case: Case, name: str, timed: str, runs: RunsByPart) -> BenchmarkRow:
    """Return the row of a part; the ratio compares seconds per replicate of ``shared`` with those of ``copies``."""
    seconds = {part: min(getattr(run.value, timed) for run in measured) for part, measured in runs.items()}
    replicates = {part: measured[0].value.replicates for part, measured in runs.items()}
    row = BenchmarkRow(
        part=f"n = {case.entries}, K = {replicates[name]}, {TIMED[timed]}: {name}", seconds=seconds[name],
        peak_mib=mib(max(run.value.device_peak_bytes or run.peak_bytes for run in runs[name])),
        rate=replicates[name] * len(case.actions()) * (case.horizon - 1) / seconds[name],
    )  # fmt: skip
    if name == "shared" and "copies" in runs:
        each = {part: seconds[part] / replicates[part] for part in ("shared", "copies")}
        return replace(row, peer="copies", ratio=each["copies"] / each["shared"])
    return row


def _facts(case: Case, runs: RunsByPart) -> dict[str, Any]:
    """Return the facts of one prompt length: streams, tokens that differ, and bytes of copies."""
    facts: dict[str, Any] = {
        "streams_per_step": {name: round(repetitions[0].value.streams, 1) for name, repetitions in runs.items()}
    }
    copies = model_shape(case).entry_bytes * case.replicates * (case.entries + case.horizon)
    facts["mib_of_copies_for_the_reference_alone"] = round(mib(copies))
    if "shared" in runs:
        tokens = runs["shared"][0].value.tokens
        facts["mismatch"] = round(float((tokens[:, 0] != tokens[:, 1]).mean()), 3)
        if "copies" in runs:  # of the replicates that both have; other kernels round differently
            copied = runs["copies"][0].value
            facts["different_tokens"] = int((tokens[:, :, : copied.replicates] != copied.tokens).sum())
    return facts


def measure_all(options: argparse.Namespace, _: Path) -> Iterator[Measurement]:
    """Measure each prompt length of ``--entries``, by default those of the preset."""
    shape, lengths = PRESETS[options.preset]
    sizes = {name: value for name in ("replicates", "horizon") if (value := getattr(options, name)) is not None}
    case, lengths = replace(shape, device=options.device, threads=options.threads, **sizes), options.entries or lengths
    yield [], {"preset": options.preset, "case": asdict(case) | {"entries": lengths}}
    for entries in lengths:
        yield compare(replace(case, entries=entries), options.parts, options.repetitions)


def prompt_entries(text: str) -> int:
    """Read a prompt length of ``--entries``, a number of at least ``_FEWEST``."""
    if int(text) < _FEWEST:
        raise argparse.ArgumentTypeError(f"{text}: give {_FEWEST} or more, for SnapKV's window")
    return int(text)


if __name__ == "__main__":
    parser = benchmark_parser("generation", "Measure generation with shared prompts, against copies of the prompt.")
    parser.add_argument("--preset", choices=PRESETS, default="small", help="the model's shape and its sizes")
    parser.add_argument("--entries", type=prompt_entries, nargs="+", help="prompt lengths n")
    parser.add_argument("--replicates", type=int, help="replicates K of each action")
    parser.add_argument("--horizon", type=int, help="horizon H, in tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of a CPU")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure, or none")
    parser.add_argument("--repetitions", type=int, default=2)
    run(parser, "steps", measure_all)
