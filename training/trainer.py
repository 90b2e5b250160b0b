"""One optimizer step of the training: batches of sequences, their weighted loss, and running measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from kvdrift.generator.embedded import vocabulary as v
from training.sequences import TrainingSequence

EMBEDDING_SHARE = 0.3
"""Learning rate of the embedding over that of the other parameters."""
WARM_UP_STEPS = 50
CONTENT_WEIGHT = 1.0
ANSWER_WEIGHT = 0.4
PROMPT_WEIGHT = 0.05
MEMORY = 0.95
"""Decay per step of the running accuracy and of the running share of asked keys."""


@dataclass(frozen=True)
class Batch:
    """B training sequences as one batch."""

    tokens: torch.Tensor  # sequences padded on the right, int64 [B, T]
    weights: torch.Tensor  # weight of each prediction's loss, float32 [B, T - 1]; column t predicts token t + 1
    contents: torch.Tensor  # rows and columns of the predictions of contents, int64 [C, 2]
    choices: torch.Tensor  # rows and columns of the predictions of choices, int64 [D, 2]
    laws: torch.Tensor  # right law of the next token at each choice, given that it is no filler, float32 [D, 256]


@dataclass(frozen=True)
class StepScores:
    """The training loss, the share of contents that the model ranks first, and the probability on right choices.

    That probability is a share of the probability besides filler.
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


class Trainer:
    """A model with its optimizer and running measures.

    ``choice_weight`` is the weight of the added loss on choices, whose right law is known exactly.
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
        """Start the running measures over; a new stage must pass on its own documents."""
        self.accuracy = self.asked = 0.0

    def step(self, batch: Batch, rate: float) -> StepScores:
        """Make one optimizer step at a learning rate, which is smaller during warm-up."""
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
    def _measure(logits: torch.Tensor, choices: torch.Tensor, batch: Batch, loss: float) -> StepScores:
        rows, columns = batch.contents.unbind(1)
        right = logits[rows, columns].argmax(-1) == batch.tokens[rows, columns + 1]
        mass = (choices.exp() * (batch.laws > 0)).sum(-1)
        return StepScores(loss, right.double().mean().item(), mass.double().mean().item())


def _choice_log_law(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the model's log law (D, 256) at the choices, over ``A``, ``<eos>`` and keys alone; -inf elsewhere."""
    outside = torch.ones(v.SIZE, dtype=torch.bool)
    outside[[v.ANSWER, v.EOS]] = False
    outside[v.FIRST_KEY : v.FIRST_VALUE] = False
    rows, columns = batch.choices.unbind(1)
    return logits[rows, columns].masked_fill(outside, -torch.inf).log_softmax(-1)
