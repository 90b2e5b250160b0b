"""The training: sequences of a prompt and a right answer, optimizer steps on their batches, and the order of batches.

A curriculum of growing documents comes first, then documents as long as those of studies, with a falling learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from kvdrift.generator.embedded import vocabulary as v
from kvdrift.generator.embedded.documents import (
    MEAN_FILLER,
    PromptLayout,
    draw_distinct,
    draw_episode,
    draw_filler,
    named_stream,
)

# Study documents have another stream: no seed makes a study document out of a training sequence.
_STREAM = "kvdrift/embedded/training"


@dataclass(frozen=True)
class TrainingSequence:
    """A prompt with one of its right answers.

    Attributes:
        tokens: Prompt and answer.
        prompt_tokens: Length of the prompt.
        choices: The positions of ``tokens`` where several tokens are right, each with the tokens that are right there
            besides filler: after an ``A`` the first keys of the items that are left; after an item and its filler
            another ``A``, or ``<eos>`` when no item is left.
        contents: The positions of each item's tokens but the first; the prompt determines the tokens there.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    choices: tuple[tuple[int, tuple[int, ...]], ...]
    contents: tuple[int, ...]


def make_training_sequence(layout: PromptLayout, index: int, seed: int) -> TrainingSequence:
    """Make the training sequence number ``index`` of a layout under a seed, with a right answer drawn at random."""
    random = named_stream(_STREAM, layout.task, layout.length, layout.items, layout.asked, index, seed)
    episode = draw_episode(layout, random)
    tokens = list(episode.prompt)
    left = [episode.asked[number] for number in draw_distinct(random, len(episode.asked), len(episode.asked))]
    choices: list[tuple[int, tuple[int, ...]]] = []
    contents: list[int] = []
    go_on = MEAN_FILLER / (1 + MEAN_FILLER)  # of a geometric count with this mean
    while left:
        choices.append((len(tokens), tuple(item[0] for item in left)))
        item = left.pop()
        contents += range(len(tokens) + 1, len(tokens) + len(item))
        tokens += item
        # 1 - random() is never 0, so the logarithm is finite.
        between = draw_filler(random, int(np.log(1 - random.random()) / np.log(go_on)))
        closing = v.ANSWER if left else v.EOS
        choices += [(len(tokens) + step, (closing,)) for step in range(len(between) + 1)]
        tokens += [*between, closing]
    return TrainingSequence(tuple(tokens), len(episode.prompt), tuple(choices), tuple(contents))


EMBEDDING_SHARE = 0.3
"""Learning rate of the embedding over that of the other parameters."""
WARM_UP_STEPS = 50
CONTENT_WEIGHT = 1.0
ANSWER_WEIGHT = 0.4
PROMPT_WEIGHT = 0.05
MEMORY = 0.95
"""Decay per step of the running means of accuracy and of the probability on right choices."""


@dataclass(frozen=True)
class Batch:
    """B training sequences as one batch."""

    tokens: torch.Tensor  # sequences padded on the right, int64 [B, T]
    weights: torch.Tensor  # weight of each prediction's loss, float32 [B, T - 1]; column t predicts token t + 1
    contents: torch.Tensor  # rows and columns of the predictions of contents, int64 [C, 2]
    choices: torch.Tensor  # rows and columns of the predictions of choices, int64 [D, 2]
    # right next-token distribution at each choice, given that the token is no filler, float32 [D, 256]
    distributions: torch.Tensor


@dataclass(frozen=True)
class StepScores:
    """The loss of a step, the share of contents that the model ranks first, and the mean probability of right choices.

    Contents and choices are those of ``TrainingSequence``. A probability is that among ``A``, ``<eos>`` and keys alone.
    """

    loss: float
    accuracy: float
    asked: float


def collate(sequences: Sequence[TrainingSequence]) -> Batch:
    """Pad training sequences into one batch; causal attention never sees the padding, so there is no mask."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = torch.full((len(sequences), longest), v.PAD)
    weights = torch.zeros(len(sequences), longest - 1)
    contents: list[tuple[int, int]] = []
    choices: list[tuple[int, int]] = []
    distributions = torch.zeros(sum(len(sequence.choices) for sequence in sequences), v.SIZE)
    for row, sequence in enumerate(sequences):
        end, prompt = len(sequence.tokens), sequence.prompt_tokens
        tokens[row, :end] = torch.tensor(sequence.tokens)
        weights[row, : prompt - 1] = PROMPT_WEIGHT
        weights[row, prompt - 1 : end - 1] = ANSWER_WEIGHT
        for position in sequence.contents:
            weights[row, position - 1] = CONTENT_WEIGHT
            contents.append((row, position - 1))
        for position, allowed in sequence.choices:
            distributions[len(choices), list(allowed)] = 1 / len(allowed)
            choices.append((row, position - 1))
    return Batch(tokens, weights, torch.tensor(contents), torch.tensor(choices), distributions)


class Trainer:
    """A model with its optimizer, and the running means of two fields of ``StepScores``: ``accuracy`` and ``asked``.

    ``choice_weight`` is the weight of a further loss, at the positions whose right next-token distribution is known.
    """

    def __init__(self, model: Qwen2ForCausalLM, choice_weight: float) -> None:
        self.model, self.choice_weight = model, choice_weight
        embedding = model.model.embed_tokens.weight
        matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        # The seeded heads look for the directions of a few embeddings, which therefore must move slowly.
        groups = [
            {"params": [embedding], "weight_decay": 0.05, "share": EMBEDDING_SHARE},
            {"params": matrices, "weight_decay": 0.05, "share": 1.0},
            {"params": vectors, "weight_decay": 0.0, "share": 1.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))
        self.steps = self.tokens = 0
        self.forget_measures()

    def forget_measures(self) -> None:
        """Start both running means over, so that a new stage passes only on its own documents."""
        self.accuracy = self.asked = 0.0

    def step(self, batch: Batch, rate: float) -> StepScores:
        """Make one optimizer step on a batch at the learning rate ``rate``, which is smaller during warm-up."""
        self.steps += 1
        self.tokens += batch.tokens.numel()
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * rate * min(1.0, self.steps / WARM_UP_STEPS)
        logits = self.model(input_ids=batch.tokens[:, :-1], use_cache=False).logits  # (B, T - 1, 256)
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        weights = batch.weights.flatten()
        choices = _choice_log_probabilities(logits, batch)
        loss = (losses * weights).sum() / weights.sum()
        agreement = (batch.distributions * choices.clamp_min(-1e4)).sum(-1)  # (D,)
        loss = loss - self.choice_weight * agreement.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        outcome = self._measure(logits.detach(), choices.detach(), batch, loss.item())
        self.accuracy = MEMORY * self.accuracy + (1 - MEMORY) * outcome.accuracy
        self.asked = MEMORY * self.asked + (1 - MEMORY) * outcome.asked
        return outcome

    def report(self, name: str, scores: StepScores) -> None:
        """Print the step, the loss and both running means on a line that begins with ``name``."""
        print(
            f"{name:>10}  step {self.steps:5d}  loss {scores.loss:.3f}  contents {self.accuracy:.3f}"
            f"  asked {self.asked:.3f}",
            flush=True,
        )

    @staticmethod
    def _measure(logits: torch.Tensor, choices: torch.Tensor, batch: Batch, loss: float) -> StepScores:
        rows, columns = batch.contents.unbind(1)
        right = logits[rows, columns].argmax(-1) == batch.tokens[rows, columns + 1]
        mass = (choices.exp() * (batch.distributions > 0)).sum(-1)
        return StepScores(loss, right.double().mean().item(), mass.double().mean().item())


def _choice_log_probabilities(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return log probabilities (D, 256) at the batch's D choices, among ``A``, ``<eos>`` and keys; others have -inf."""
    outside = torch.ones(v.SIZE, dtype=torch.bool)
    outside[[v.ANSWER, v.EOS]] = False
    outside[v.FIRST_KEY : v.FIRST_VALUE] = False
    rows, columns = batch.choices.unbind(1)
    return logits[rows, columns].masked_fill(outside, -torch.inf).log_softmax(-1)


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
    needles: tuple[int, int]  # items of a needle document, and the number of asked items
    chains: tuple[int, int]  # chains of a variable-tracking document, and the number of asked chains
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
REPORT_STEPS = 20


def batches(stage: CurriculumStage, seed: int, first: int = 0) -> Iterator[Batch]:
    """Yield batches of a stage without end, each half needle, half chain sequences, from sequence ``first`` on."""
    index = first
    while True:
        half = stage.batch // 2
        sequences = [make_training_sequence(layout, index + n, seed) for layout in stage.layouts() for n in range(half)]
        index += half
        yield collate(sequences)


def run_curriculum(model: Qwen2ForCausalLM, seed: int) -> Trainer:
    """Train a model on growing documents at the peak rate; return its trainer.

    A stage ends when both running means, of retrieval and of the choice of asked keys, pass their bounds, or after its
    most steps. A model that moves on before it chooses the asked keys never learns to choose them.
    """
    trainer = Trainer(model, CHOICE_WEIGHT)
    for stage in CURRICULUM:
        trainer.forget_measures()
        for taken, batch in enumerate(islice(batches(stage, seed), stage.steps), start=1):
            scores = trainer.step(batch, PEAK_RATE)
            passed = taken >= stage.least and trainer.accuracy > PASS_ACCURACY and trainer.asked > PASS_ASKED
            if passed or taken % REPORT_STEPS == 0:
                trainer.report(f"{stage.length} body", scores)
            if passed:
                break
    return trainer


def run_last(model: Qwen2ForCausalLM, seed: int, cycles: int) -> Trainer:
    """Train ``cycles`` times on a batch of each study length, with a falling rate; return the trainer, a new one."""
    trainer = Trainer(model, LAST_CHOICE_WEIGHT)
    stages = [CurriculumStage(length, (16, 5), (5, 3), batch, cycles) for length, batch in LAST_BATCHES.items()]
    # Documents that the curriculum has not shown.
    streams = [batches(stage, seed, first=1_000_000) for stage in stages]
    for cycle in range(cycles):
        rate = LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * cycle / cycles))
        for stream in streams:
            scores = trainer.step(next(stream), rate)
            if trainer.steps % REPORT_STEPS == 0:
                trainer.report("all bodies", scores)
    return trainer
