"""The order of the training: a curriculum of growing documents, then the study lengths with a falling rate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import Qwen2ForCausalLM

from kvdrift.generator.embedded.documents import PromptLayout
from training.sequences import make_training_sequence
from training.trainer import Batch, StepScores, Trainer, collate

PEAK_RATE = 1.5e-3
LAST_RATE = 5e-5
CHOICE_WEIGHT = 0.5
"""Weight of the loss on choices in the curriculum."""
LAST_CHOICE_WEIGHT = 1.0
"""Weight of the loss on choices after the curriculum."""


@dataclass(frozen=True)
class CurriculumStage:
    """One stage of the curriculum."""

    length: int  # tokens of a body
    needles: tuple[int, int]  # items of a needle document, and how many of them are asked
    chains: tuple[int, int]  # chains of a variable-tracking document, and how many of them are asked
    batch: int  # sequences of a batch
    steps: int  # most steps of the stage
    least: int = 40  # fewest steps; after them the stage ends as soon as both running measures pass

    def layouts(self) -> tuple[PromptLayout, PromptLayout]:
        """Return the needle and the chain layout of the stage."""
        return (
            PromptLayout("needle", self.length, *self.needles),
            PromptLayout("variable_tracking", self.length, *self.chains),
        )


CURRICULUM = (
    CurriculumStage(31, needles=(6, 3), chains=(2, 1), batch=32, steps=1500),
    CurriculumStage(61, needles=(8, 4), chains=(3, 2), batch=32, steps=600),
    CurriculumStage(160, needles=(12, 5), chains=(4, 2), batch=24, steps=400),
    CurriculumStage(384, needles=(16, 5), chains=(5, 3), batch=12, steps=400),
    CurriculumStage(768, needles=(16, 5), chains=(5, 3), batch=8, steps=300),
)
PASS_ACCURACY = 0.9
PASS_ASKED = 0.9
LAST_BATCHES = {384: 12, 768: 8, 1536: 4}


def batches(stage: CurriculumStage, seed: int, first: int = 0) -> Iterator[Batch]:
    """Make the endless batches of a stage, half of each needles and half chains, from document ``first`` on."""
    index = first
    while True:
        half = stage.batch // 2
        sequences = [make_training_sequence(layout, index + n, seed) for layout in stage.layouts() for n in range(half)]
        index += half
        yield collate(sequences)


class TrainingProgress:
    """Prints a line now and then: where training is, its rate, and at most how long it still takes."""

    def __init__(self, total_tokens: int) -> None:
        self.total, self.skipped = total_tokens, 0
        self.started = self.printed = time.monotonic()

    def report(self, name: str, trainer: Trainer, scores: StepScores, *, last: bool = False) -> None:
        """Print one line, if the last line is ten seconds old or ``last`` is set."""
        now = time.monotonic()
        if not last and now - self.printed < 10:
            return
        self.printed = now
        rate = trainer.tokens / (now - self.started)
        left = max(0, self.total - self.skipped - trainer.tokens) / rate
        print(
            f"{name:>10}  step {trainer.steps:5d}  loss {scores.loss:.3f}  contents {trainer.accuracy:.3f}"
            f"  asked {trainer.asked:.3f}  {rate:7,.0f} tokens/s  at most {left / 60:4.1f} min left",
            flush=True,
        )


def run_curriculum(model: Qwen2ForCausalLM, seed: int) -> Trainer:
    """Train on growing documents at the peak rate.

    A stage ends when retrieval and the choice of asked keys both pass. A model that moves on before it chooses the
    asked keys never learns to choose them.
    """
    trainer = Trainer(model, CHOICE_WEIGHT)
    progress = TrainingProgress(sum(_tokens(stage) for stage in CURRICULUM))
    for stage in CURRICULUM:
        trainer.forget_measures()
        first = trainer.steps
        for batch in batches(stage, seed):
            scores = trainer.step(batch, PEAK_RATE)
            taken = trainer.steps - first
            passed = taken >= stage.least and trainer.accuracy > PASS_ACCURACY and trainer.asked > PASS_ASKED
            done = passed or taken == stage.steps
            progress.report(f"{stage.length} body", trainer, scores, last=done)
            if done:
                progress.skipped += _tokens(stage) * (stage.steps - taken) // stage.steps
                break
    return trainer


def run_last(model: Qwen2ForCausalLM, seed: int, cycles: int) -> Trainer:
    """Train for ``cycles`` rounds over the study lengths, with a fresh optimizer, while the rate falls."""
    trainer = Trainer(model, LAST_CHOICE_WEIGHT)
    stages = [CurriculumStage(length, (16, 5), (5, 3), batch, cycles) for length, batch in LAST_BATCHES.items()]
    progress = TrainingProgress(sum(_tokens(stage) for stage in stages))
    # Documents that the curriculum has not shown.
    streams = [batches(stage, seed, first=1_000_000) for stage in stages]
    for cycle in range(cycles):
        rate = LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * cycle / cycles))
        for stream in streams:
            scores = trainer.step(next(stream), rate)
            progress.report("all bodies", trainer, scores, last=cycle == cycles - 1 and stream is streams[-1])
    return trainer


def _tokens(stage: CurriculumStage) -> int:
    """Return roughly how many tokens a stage has if it uses all its steps."""
    return stage.steps * stage.batch * (stage.length + 70)
