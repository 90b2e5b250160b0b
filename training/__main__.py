"""Train the embedded model, save its checkpoint and measure it.

    python -m training --seed 7 --output my-checkpoint

This command made the committed checkpoint in two runs, the second with ``--start``. Training takes about 550 CPU
seconds on one thread, and keeps to one: more threads are slower on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM
from transformers.utils import logging

from kvdrift.generator.embedded.documents import LENGTHS, TASKS, make_document
from training.accuracy import Accuracy, measure_accuracy
from training.model import build_model, save_checkpoint
from training.trainer import run_curriculum, run_last

CHECK_SEED = 20_000_003
"""Seed of the documents on which the final accuracy is measured; studies use other seeds."""


def _check(model: Qwen2ForCausalLM, count: int) -> list[Accuracy]:
    strata = ([make_document(task, n, i, CHECK_SEED) for i in range(count)] for task in TASKS for n in LENGTHS)
    return [measure_accuracy(model, documents, seed=CHECK_SEED) for documents in strata]


def main() -> None:
    """Train, save and measure the model, and print the checkpoint's path."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--seed", type=int, default=7, help="seed of the initialization and of the training documents")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the checkpoint; the curriculum's model goes beside it"
    )
    parser.add_argument("--cycles", type=int, default=175, help="number of last rounds over the three study lengths")
    parser.add_argument("--start", type=Path, help="model folder that the curriculum wrote; train only the last rounds")
    parser.add_argument("--documents", type=int, default=48, help="documents per task and length for the accuracy")
    options = parser.parse_args()
    if options.cycles < 1 or options.documents < 1:
        parser.error("--cycles and --documents must be at least 1")
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    wall, cpu = time.monotonic(), time.process_time()
    if options.start is None:
        model = build_model(options.seed)
        trainers = [run_curriculum(model, options.seed)]
        save_checkpoint(model, options.output.with_name(f"{options.output.name}-curriculum"))
    else:
        if not (options.start / "config.json").is_file():
            parser.error(f"--start: {options.start} is no model folder, it has no config.json")
        model = Qwen2ForCausalLM.from_pretrained(options.start)
        model.train()
        trainers = []
    trainers.append(run_last(model, options.seed, options.cycles))
    save_checkpoint(model, options.output)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    model.eval()  # type: ignore[no-untyped-call]
    rows = _check(model, options.documents)
    steps, tokens = sum(trainer.steps for trainer in trainers), sum(trainer.tokens for trainer in trainers)
    for row in rows:
        print(row.line())
    print(f"{steps} steps, {tokens:,} tokens, {cpu:.0f} CPU seconds, {wall:.0f} seconds")
    print(f"checkpoint: {options.output}")


if __name__ == "__main__":
    main()
