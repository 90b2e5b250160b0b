"""Time a press through the engine ``transformers`` beside the same selection in kvdrift's own forward pass.

    python -m benchmarks.presses                                    # SnapKV on SmolLM2; needs `make presses`
    python -m benchmarks.presses --model kvdrift/tiny --settings '{"cache": "DynamicCache"}'

One document is generated in each way: K pairs of an action and its reference. Loading and trials are not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, run
from kvdrift.generator.actions import build_actions
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.other_weights.model import load_transformer
from kvdrift.schema.document import Document
from kvdrift.schema.study import Study, load_studies

_STUDY = """
[study]
name = "presses"
horizon = {horizon}
[model]
id = "{model}"
{engine}
[[documents]]
source = "embedded"
tasks = ["needle"]
length = 384
development = 2
evaluation = 2
[[actions]]
name = "half"
{action}
[plan]
baseline = "half"
primary = ["mismatch"]
"""
_SELECTOR = 'selector = "snapkv"\nkeep = "1/2"'


def seconds(model: Any, study: Study, document: Document, replicates: int, repetitions: int) -> float:
    """Return the least seconds of generating the document's unit."""
    pending = [PendingUnit(action, 0, replicates) for action in build_actions(study) if action.name == "half"]
    measured = []
    for _ in range(repetitions):
        began = time.perf_counter()
        generate_units(model, study.name, document, pending, study.study.horizon, 7)
        measured.append(time.perf_counter() - began)
    return min(measured)


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure both ways in this process, in turn; the ratio compares the selector with the engine."""
    settings = ", ".join(f"{name} = {json.dumps(value)}" for name, value in json.loads(options.settings).items())
    studies = []
    for engine, action in (("", _SELECTOR), ('engine = "transformers"', f"settings = {{ {settings} }}")):
        path = folder / "presses.toml"
        path.write_text(_STUDY.format(horizon=options.horizon, model=options.model, engine=engine, action=action))
        studies += load_studies(path)
    own, engine_study = studies
    loaded, made = load_transformer(own, lambda _: None), engine_model(engine_study)
    made.load(lambda _: None)
    vocabulary = made.reference.facts.vocabulary
    tokens = tuple(np.random.default_rng(7).integers(0, vocabulary, options.prompt).tolist())
    document = Document("document", "text", "document", "", "", tokens)
    ways = {"selector": (loaded, own), "engine": (made, engine_study)}
    took = {
        name: seconds(model, study, document, options.replicates, options.repetitions)
        for name, (model, study) in ways.items()
    }
    ratio = took["engine"] / took["selector"]
    yield (
        [
            BenchmarkRow("engine", took["engine"]),
            BenchmarkRow("selector", took["selector"], peer="engine", ratio=ratio),
        ],
        {"settings": settings, "prompt": options.prompt, "replicates": options.replicates, "horizon": options.horizon},
    )


if __name__ == "__main__":
    parser = benchmark_parser(
        "presses", "A press through the engine transformers, and the same selection by a selector."
    )
    parser.add_argument("--model", default="kvdrift/smollm2")
    parser.add_argument("--settings", default='{"press": "SnapKVPress(compression_ratio=0.5)"}')
    parser.add_argument("--prompt", type=int, default=1_000, metavar="N")
    parser.add_argument("--replicates", type=int, default=8, metavar="K")
    parser.add_argument("--horizon", type=int, default=48, metavar="H")
    parser.add_argument("--repetitions", type=int, default=2)
    run(parser, "documents", measure_all)
