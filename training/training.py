"""Training of the embedded model: a curriculum of growing documents, then the study lengths with a falling rate.

Run as ``python -m training.training --seed 7 --output DIR``; the committed checkpoint was made so, its two
parts in two runs joined by ``--start``. It takes about 550 CPU seconds on one thread, which it keeps to: more threads
are slower on a busy machine.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, Qwen2ForCausalLM
from transformers.utils import logging

from generator.embedded import documents as d
from generator.embedded import vocabulary as v
from training.accuracy import Accuracy, measure
from training.initialization import build_model

PEAK_RATE = 1.5e-3
LAST_RATE = 5e-5
EMBEDDING_SHARE = 0.3
WARM_UP_STEPS = 50
CONTENT_WEIGHT = 1.0
ANSWER_WEIGHT = 0.4
PROMPT_WEIGHT = 0.05
CHOICE_WEIGHT = 0.5
"""Of the added loss on choices, whose right law given no filler is known exactly; in the curriculum."""
LAST_CHOICE_WEIGHT = 1.0
"""The same after the curriculum."""
MEMORY = 0.95
"""Decay per step of the running accuracy and of the running share of asked keys."""

CHECK_SEED = 20_000_003
"""Seed of the documents that the accuracy at the end is measured on; studies use others."""


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: bodies of ``length`` tokens and, for each task, its items and how many are asked.

    ``steps`` bounds the stage; it ends earlier, after at least ``least`` steps, when both running measures pass.
    """

    length: int
    needles: tuple[int, int]
    chains: tuple[int, int]
    batch: int
    steps: int
    least: int = 40

    def layouts(self) -> tuple[d.Layout, d.Layout]:
        """The needle and the chain layout of the stage."""
        return (
            d.Layout("needle", self.length, *self.needles),
            d.Layout("variable_tracking", self.length, *self.chains),
        )


CURRICULUM = (
    Stage(31, needles=(6, 3), chains=(2, 1), batch=32, steps=1500),
    Stage(61, needles=(8, 4), chains=(3, 2), batch=32, steps=600),
    Stage(160, needles=(12, 5), chains=(4, 2), batch=24, steps=400),
    Stage(384, needles=(16, 5), chains=(5, 3), batch=12, steps=400),
    Stage(768, needles=(16, 5), chains=(5, 3), batch=8, steps=300),
)
PASS_ACCURACY = 0.9
PASS_ASKED = 0.9
LAST_BATCHES = {384: 12, 768: 8, 1536: 4}


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right to (B, T) int64, and for each target position the weight of its loss.

    ``weights`` is (B, T - 1) float32, its column t for the prediction of token t + 1. ``contents`` is (C, 2) and
    ``choices`` (D, 2) int64, both (row, column of the prediction); ``laws`` is (D, 256) float32, the law of the next
    token given that it is no filler.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    contents: torch.Tensor
    choices: torch.Tensor
    laws: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """What one step measured: loss, share of contents predicted first, share of non-filler mass on right choices."""

    loss: float
    accuracy: float
    asked: float


def collate(sequences: Sequence[d.TrainingSequence]) -> Batch:
    """Pad training sequences into one batch. Causal attention never sees the padding, so there is no mask."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = torch.full((len(sequences), longest), v.PAD)
    weights = torch.zeros(len(sequences), longest - 1)
    contents: list[tuple[int, int]] = []
    choices: list[tuple[int, int]] = []
    laws = torch.zeros(sum(len(sequence.choices) for sequence in sequences), v.SIZE)
    for row, sequence in enumerate(sequences):
        end, prompt = len(sequence.tokens), sequence.prompt_tokens
        tokens[row, :end] = torch.tensor(sequence.tokens)
        weights[row, : prompt - 1] = PROMPT_WEIGHT
        weights[row, prompt - 1 : end - 1] = ANSWER_WEIGHT
        for position in sequence.contents:
            weights[row, position - 1] = CONTENT_WEIGHT
            contents.append((row, position - 1))
        for position, allowed in sequence.choices:
            laws[len(choices), list(allowed)] = 1 / len(allowed)
            choices.append((row, position - 1))
    return Batch(tokens, weights, torch.tensor(contents), torch.tensor(choices), laws)


def batches(stage: Stage, seed: int, first: int = 0) -> Iterator[Batch]:
    """The endless batches of a stage, half of each one needles and half chains, from document ``first`` on."""
    index = first
    while True:
        half = stage.batch // 2
        sequences = [
            d.make_training_sequence(layout, index + n, seed) for layout in stage.layouts() for n in range(half)
        ]
        index += half
        yield collate(sequences)


class Trainer:
    """A model with its optimizer and running measures; ``step`` takes one batch."""

    def __init__(self, model: Qwen2ForCausalLM, choice_weight: float) -> None:
        self.model = model
        self.choice_weight = choice_weight
        embedding = model.model.embed_tokens.weight
        matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        # The seeded heads look for the directions of a few embeddings, which therefore must move slowly.
        groups = [
            {"params": [embedding], "weight_decay": 0.05, "share": EMBEDDING_SHARE},
            {"params": matrices, "weight_decay": 0.05, "share": 1.0},
            {"params": vectors, "weight_decay": 0.0, "share": 1.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
        self.steps = 0
        self.tokens = 0
        self.accuracy = 0.0
        self.asked = 0.0

    def forget_measures(self) -> None:
        """Start the running measures over; a new stage must pass on its own documents."""
        self.accuracy = 0.0
        self.asked = 0.0

    def step(self, batch: Batch, rate: float) -> Outcome:
        """One optimizer step at a learning rate, shortened during warm-up."""
        self.steps += 1
        self.tokens += batch.tokens.numel()
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * rate * min(1.0, self.steps / WARM_UP_STEPS)
        logits = self.model(input_ids=batch.tokens[:, :-1], use_cache=False).logits  # (B, T - 1, 256)
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        weights = batch.weights.flatten()
        choices = _choice_log_law(logits, batch)
        loss = (losses * weights).sum() / weights.sum()
        agreement = (batch.laws * choices.clamp_min(-1e4)).sum(-1)  # (D,)
        loss = loss - self.choice_weight * agreement.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        outcome = self._measure(logits.detach(), choices.detach(), batch, loss.item())
        self.accuracy = MEMORY * self.accuracy + (1 - MEMORY) * outcome.accuracy
        self.asked = MEMORY * self.asked + (1 - MEMORY) * outcome.asked
        return outcome

    @staticmethod
    def _measure(logits: torch.Tensor, choices: torch.Tensor, batch: Batch, loss: float) -> Outcome:
        rows, columns = batch.contents.unbind(1)
        right = logits[rows, columns].argmax(-1) == batch.tokens[rows, columns + 1]
        mass = (choices.exp() * (batch.laws > 0)).sum(-1)
        return Outcome(loss, right.double().mean().item(), mass.double().mean().item())


def _choice_log_law(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The model's log law (D, 256) over ``A``, ``<eos>`` and keys alone at the choices; -inf elsewhere."""
    outside = torch.ones(v.SIZE, dtype=torch.bool)
    outside[[v.ANSWER, v.EOS]] = False
    outside[v.FIRST_KEY : v.FIRST_VALUE] = False
    rows, columns = batch.choices.unbind(1)
    return logits[rows, columns].masked_fill(outside, -torch.inf).log_softmax(-1)


class Progress:
    """Prints a line now and then: where training is, its rate, and at most how long it still takes."""

    def __init__(self, total_tokens: int) -> None:
        self.total = total_tokens
        self.skipped = 0
        self.started = time.monotonic()
        self.printed = self.started

    def report(self, name: str, trainer: Trainer, outcome: Outcome, *, last: bool = False) -> None:
        """One line, if the last one is ten seconds old or ``last`` is set."""
        now = time.monotonic()
        if not last and now - self.printed < 10:
            return
        self.printed = now
        rate = trainer.tokens / (now - self.started)
        left = max(0, self.total - self.skipped - trainer.tokens) / rate
        print(
            f"{name:>10}  step {trainer.steps:5d}  loss {outcome.loss:.3f}  contents {trainer.accuracy:.3f}"
            f"  asked {trainer.asked:.3f}  {rate:7,.0f} tokens/s  at most {left / 60:4.1f} min left",
            flush=True,
        )


def run_curriculum(model: Qwen2ForCausalLM, seed: int) -> Trainer:
    """Train on growing documents at the peak rate.

    A stage ends when retrieval and the choice of asked keys both pass: going on before the second does costs it for
    good.
    """
    trainer = Trainer(model, CHOICE_WEIGHT)
    progress = Progress(sum(_tokens(stage) for stage in CURRICULUM))
    for stage in CURRICULUM:
        trainer.forget_measures()
        first = trainer.steps
        for batch in batches(stage, seed):
            outcome = trainer.step(batch, PEAK_RATE)
            taken = trainer.steps - first
            passed = taken >= stage.least and trainer.accuracy > PASS_ACCURACY and trainer.asked > PASS_ASKED
            done = passed or taken == stage.steps
            progress.report(f"{stage.length} body", trainer, outcome, last=done)
            if done:
                progress.skipped += _tokens(stage) * (stage.steps - taken) // stage.steps
                break
    return trainer


def run_last(model: Qwen2ForCausalLM, seed: int, cycles: int) -> Trainer:
    """Train for ``cycles`` rounds over the study lengths, with a fresh optimizer, while the rate falls."""
    trainer = Trainer(model, LAST_CHOICE_WEIGHT)
    stages = [Stage(length, (16, 5), (5, 3), batch, cycles) for length, batch in LAST_BATCHES.items()]
    progress = Progress(sum(_tokens(stage) for stage in stages))
    # Documents that the curriculum has not shown.
    streams = [batches(stage, seed, first=1_000_000) for stage in stages]
    for cycle in range(cycles):
        rate = LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * cycle / cycles))
        for stream in streams:
            outcome = trainer.step(next(stream), rate)
            progress.report("all bodies", trainer, outcome, last=cycle == cycles - 1 and stream is streams[-1])
    return trainer


def _tokens(stage: Stage) -> int:
    """About how many tokens a stage has if it uses all its steps."""
    return stage.steps * stage.batch * (stage.length + 70)


def save(model: Qwen2ForCausalLM, output: Path) -> None:
    """Leave the model and its tokenizer in a folder, in the ordinary Hugging Face form."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, bos_token_id=v.BOS, eos_token_id=v.EOS, pad_token_id=v.PAD
    )
    model.save_pretrained(output)
    v.build_tokenizer().save_pretrained(output)


def check(model: Qwen2ForCausalLM, count: int) -> list[Accuracy]:
    """Record accuracy on ``count`` fresh documents of every task and length."""
    rows = []
    for task in d.TASKS:
        for length in d.LENGTHS:
            documents = [d.make_document(task, length, index, CHECK_SEED) for index in range(count)]
            rows.append(measure(model, documents, seed=CHECK_SEED))
    return rows


def main() -> None:
    """Train, save, measure, and say where the checkpoint is."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--seed", type=int, default=7, help="of the initialization and of the training documents")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the checkpoint; the curriculum's model goes beside it"
    )
    parser.add_argument("--cycles", type=int, default=175, help="rounds over the three study lengths at the end")
    parser.add_argument("--start", type=Path, help="model folder that has the curriculum behind it, to go on from")
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
        save(model, options.output.with_name(f"{options.output.name}-curriculum"))
    else:
        if not (options.start / "config.json").is_file():
            parser.error(f"--start: {options.start} is no model folder, it has no config.json")
        model = Qwen2ForCausalLM.from_pretrained(options.start)
        model.train()
        trainers = []
    trainers.append(run_last(model, options.seed, options.cycles))
    save(model, options.output)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    model.eval()  # type: ignore[no-untyped-call]
    rows = check(model, options.documents)
    steps, tokens = sum(trainer.steps for trainer in trainers), sum(trainer.tokens for trainer in trainers)
    for row in rows:
        print(row.line())
    print(f"{steps} steps, {tokens:,} tokens, {cpu:.0f} CPU seconds, {wall:.0f} seconds")
    print(f"checkpoint: {options.output}")


if __name__ == "__main__":
    main()
