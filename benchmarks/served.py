"""Time documents on two vLLM by their own decoding steps beside the same documents with distributions as JSON.

    python -m benchmarks.served --model FOLDER --reference http://127.0.0.1:8101 --action http://127.0.0.1:8102

Both servers run with ``--max-logprobs -1 --logits-processors kvdrift.vllm:Distributions``. FOLDER is the model that
they serve. Prompts are random tokens. The first document of each way, which warms the servers, is not timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, run
from kvdrift.generator.actions import build_actions
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.transformer.files.local_folders import local_configuration
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import load_studies

_STUDY = """
[study]
name = "served"
horizon = {horizon}
[model]
engine = "http"
id = "{model}"
url = "{reference}"
settings = {{ api = "vllm", vocabulary = {vocabulary}, processor = {processor} }}
[[documents]]
source = "embedded"
tasks = ["needle"]
length = 384
development = 2
evaluation = 2
[[actions]]
name = "other"
url = "{action}"
[plan]
baseline = "other"
primary = ["mismatch"]
"""


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure JSON and decoding steps on the same servers, one after the other; the ratio is that of the seconds."""
    configuration = local_configuration(options.model)
    if configuration is None:
        raise InputError(
            f"--model {options.model}: no config.json: write the folder of the model that the servers serve"
        )
    vocabulary, took = int(configuration["vocab_size"]), {}
    random = np.random.default_rng(7)
    prompts = [tuple(random.integers(3, vocabulary, options.prompt).tolist()) for _ in range(options.documents + 1)]
    for name, processor in (("json", "false"), ("steps", "true")):
        path = folder / "served.toml"
        path.write_text(_STUDY.format(**vars(options), vocabulary=vocabulary, processor=processor))
        (study,) = load_studies(path)
        model, actions = engine_model(study), build_actions(study)
        began = time.perf_counter()
        for number, tokens in enumerate(prompts):
            if number == 1:
                began = time.perf_counter()
            document = Document(f"document {number}", "text", f"document {number}", "", "", tokens)
            pending = [PendingUnit(action, 0, options.replicates if number else 1) for action in actions]
            generate_units(model, study.name, document, pending, options.horizon if number else 2, 7)
        took[name] = time.perf_counter() - began
    yield (
        [
            BenchmarkRow("json", took["json"]),
            BenchmarkRow("steps", took["steps"], peer="json", ratio=took["json"] / took["steps"]),
        ],
        {name: getattr(options, name) for name in ("documents", "prompt", "replicates", "horizon")},
    )


if __name__ == "__main__":
    parser = benchmark_parser("served", "Documents on two vLLM by their decoding steps, and with JSON.")
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--reference", required=True, metavar="URL")
    parser.add_argument("--action", required=True, metavar="URL")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=400, metavar="N")
    parser.add_argument("--replicates", type=int, default=4, metavar="K")
    parser.add_argument("--horizon", type=int, default=32, metavar="H")
    run(parser, "documents", measure_all)
