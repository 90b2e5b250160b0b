"""Decoding with codecs beside evictions, against evictions alone: seconds of a law.

    python -m benchmarks.interventions --threads 1    # n = 1k and 4k: a quarter of an hour
    python -m benchmarks.interventions --entries 512 --replicates 4 --horizon 8 --repetitions 1

The model and the prompt are those of ``benchmarks.generation``. Six actions are decoded together: "evicting" keeps half
of the prompt by six selectors. In the others the last three are int8, int4 and fp8 of the whole prompt ("quantized"),
of the halves ("evicting and quantized"), and of the whole prompt with generated entries too, without a window of exact
ones ("generated"). Parts take turns in one process; seconds are those of a law, the least of the repetitions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import SEED, Case, random_document, random_model
from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, in_turn, run
from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.model import LoadedModel
from kvdrift.schema.study import ActionSection

_SELECTORS, _OTHERS = ("snapkv", "recent", "knorm"), ("keydiff", "tova", "random")
_CODECS = ("int8", "int4", "fp8")
PEER = "evicting"
PARTS: dict[str, Sequence[dict[str, Any]]] = {
    PEER: [{"selector": selector, "keep": "1/2"} for selector in _OTHERS],
    "quantized": [{"codec": codec} for codec in _CODECS],
    "evicting and quantized": [
        {"selector": selector, "keep": "1/2", "codec": codec} for selector, codec in zip(_OTHERS, _CODECS, strict=True)
    ],
    "generated": [
        {"codec": {"name": codec, "generated": True, **({} if codec == "fp8" else {"residual": 0})}}
        for codec in _CODECS
    ],
}


def actions_of(part: str) -> list[Action]:
    """Make the six actions of a part."""
    halves: list[dict[str, Any]] = [{"selector": selector, "keep": "1/2"} for selector in _SELECTORS]
    return [build_action(ActionSection(name=f"a{n}", **one)) for n, one in enumerate([*halves, *PARTS[part]])]


def seconds_of_law(model: LoadedModel, case: Case, part: str) -> float:
    """Decode the actions of a part, and return the seconds of one law."""
    pending = [PendingUnit(action, 0, case.replicates) for action in actions_of(part)]
    units = generate_units(model, "benchmark", random_document(case), pending, case.horizon, SEED)
    seconds, laws = (sum(unit.record[name] for unit in units) for name in ("decode_seconds", "kernel_evaluations"))
    return float(seconds / laws)


def compare(case: Case, repetitions: int) -> Measurement:
    """Measure one prompt length."""
    model = random_model(case)
    found = in_turn({part: partial(seconds_of_law, model, case, part) for part in PARTS}, repetitions)
    least = {part: min(seconds) for part, seconds in found.items()}
    rows = [
        BenchmarkRow(f"n = {case.entries}: {part}", own, rate=1 / own, peer=PEER, ratio=least[PEER] / own)
        for part, own in least.items()
    ]
    median = {part: statistics.median(seconds) for part, seconds in found.items()}
    times = {part: round(own / median[PEER], 3) for part, own in median.items()}
    return rows, {f"n_{case.entries}_times_as_long_by_medians": times}


def measure_all(options: argparse.Namespace, _: Path) -> Iterator[Measurement]:
    """Measure each prompt length."""
    case = Case(replicates=options.replicates, horizon=options.horizon, threads=options.threads)
    yield [], {"case": asdict(case) | {"entries": options.entries}}
    for entries in options.entries:
        yield compare(replace(case, entries=entries), options.repetitions)


if __name__ == "__main__":
    parser = benchmark_parser("interventions", "Measure decoding with codecs, against evictions alone.")
    parser.add_argument("--entries", type=int, nargs="+", default=(1024, 4096), help="prompt lengths n")
    parser.add_argument("--replicates", type=int, default=16, help="K")
    parser.add_argument("--horizon", type=int, default=32, help="H")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU")
    parser.add_argument("--repetitions", type=int, default=3)
    run(parser, "laws", measure_all)
