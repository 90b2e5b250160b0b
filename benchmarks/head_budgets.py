"""Time decoding where the KV heads of a layer share its budget (AdaKV), against SnapKV with equal budgets.

    python -m benchmarks.head_budgets                                   # the shape of SmolLM2-135M, n = 1,000
    python -m benchmarks.head_budgets --embedded                        # the embedded model, 396 tokens
    python -m benchmarks.head_budgets --preset small --entries 512 --replicates 4 --horizon 8 --json

Both keep half of the prompt. They take turns, each run in a separate process; seconds are the least of the repetitions,
of decoding alone. A model of random weights has heads of nearly equal numbers of entries; the embedded model has not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import PRESETS, SEED, Case, random_document, random_model
from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, in_turn, measure, mib, run
from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import embedded_document
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SnapKV
from kvdrift.generator.selectors.selector import BUDGETS, EVEN
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.retention import Retention


@dataclass(frozen=True)
class Decoding:
    """Seconds of decoding, and how many entries the longest head of a layer has, in units of m, on average."""

    seconds: float
    longest: float


def decode(case: Case, budget: str, *, embedded: bool) -> Decoding:
    """Decode one action: SnapKV at half with this budget of heads."""
    torch.set_num_threads(case.threads)
    model = load_model(EMBEDDED_ID) if embedded else random_model(case)
    document = embedded_document() if embedded else random_document(case)
    action = Action("snapkv-half", "snapkv", SnapKV(budget=budget), Retention.parse("1/2"))
    (unit,) = generate_units(
        model, "benchmark", document, [PendingUnit(action, 0, case.replicates)], case.horizon, SEED
    )  # fmt: skip
    kept, layers = unit.record["kept_entries"], Prompt(model, document.tokens, action.selector.window).layers
    most = [index.shape[1] / kept for index in evict(layers, action.selector, kept).indices]
    return Decoding(unit.record["decode_seconds"], sum(most) / len(most))


def measure_all(options: argparse.Namespace, _: Path) -> Iterator[Measurement]:
    """Measure both budgets in turn."""
    shape, lengths = PRESETS[options.preset]
    case = replace(
        shape, entries=options.entries or lengths[0], replicates=options.replicates, horizon=options.horizon,
        threads=options.threads,
    )  # fmt: skip
    runs = in_turn(
        {
            budget: partial(measure, partial(decode, case, budget, embedded=options.embedded)) for budget in BUDGETS
        },
        options.repetitions,
    )  # fmt: skip
    seconds = {budget: min(measured.value.seconds for measured in runs[budget]) for budget in BUDGETS}
    steps = case.replicates * (case.horizon - 1)
    yield [
        BenchmarkRow(
            part=budget, seconds=seconds[budget], peak_mib=mib(max(measured.peak_bytes for measured in runs[budget])),
            rate=steps / seconds[budget], peer=None if budget == EVEN else EVEN,
            ratio=None if budget == EVEN else seconds[EVEN] / seconds[budget],
        )
        for budget in BUDGETS
    ], {"longest_head_over_mean": {budget: round(runs[budget][0].value.longest, 2) for budget in BUDGETS}}  # fmt: skip


if __name__ == "__main__":
    parser = benchmark_parser("head_budgets", "Time decoding with head budgets, against equal budgets.")
    parser.add_argument("--preset", choices=PRESETS, default="smollm2", help="the model's shape")
    parser.add_argument("--embedded", action="store_true", help="the embedded model in place of random weights")
    parser.add_argument("--entries", type=int, help="prompt length n, at least 128")
    parser.add_argument("--replicates", type=int, default=16, help="replicates K")
    parser.add_argument("--horizon", type=int, default=64, help="horizon H, in tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the CPU")
    parser.add_argument("--repetitions", type=int, default=3)
    run(parser, "steps", measure_all)
