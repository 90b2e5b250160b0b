"""Training sequences: prompts of the embedded documents, each with one right answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdrift.generator.embedded import vocabulary as v
from kvdrift.generator.embedded.documents import (
    MEAN_FILLER,
    Episode,
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
    """A prompt with one right answer.

    Attributes:
        tokens: Prompt and answer.
        prompt_tokens: Length of the prompt.
        choices: The positions of ``tokens`` where several tokens are right, each with the tokens that are right there
            besides filler: after an ``A`` the first keys of the items that are left; after an item and its filler
            another ``A``, or ``<eos>`` when no item is left.
        contents: The positions of an item's tokens after its first, which the prompt determines.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    choices: tuple[tuple[int, tuple[int, ...]], ...]
    contents: tuple[int, ...]


def make_training_sequence(layout: PromptLayout, index: int, seed: int) -> TrainingSequence:
    """Make the training sequence number ``index`` of a layout under a seed."""
    random = named_stream(_STREAM, layout.task, layout.length, layout.items, layout.asked, index, seed)
    episode = draw_episode(layout, random)
    return _answered(episode, random)


def _answered(episode: Episode, random: np.random.Generator) -> TrainingSequence:
    """Add one right answer, drawn at random."""
    tokens = list(episode.prompt)
    left = [episode.asked[number] for number in draw_distinct(random, len(episode.asked), len(episode.asked))]
    choices: list[tuple[int, tuple[int, ...]]] = []
    contents: list[int] = []
    while left:
        choices.append((len(tokens), tuple(item[0] for item in left)))
        item = left.pop()
        contents += range(len(tokens) + 1, len(tokens) + len(item))
        tokens += item
        between = draw_filler(random, _geometric(random))
        closing = v.ANSWER if left else v.EOS
        choices += [(len(tokens) + step, (closing,)) for step in range(len(between) + 1)]
        tokens += [*between, closing]
    return TrainingSequence(tuple(tokens), len(episode.prompt), tuple(choices), tuple(contents))


def _geometric(random: np.random.Generator) -> int:
    """Draw a geometric count, at least 0, with mean ``MEAN_FILLER``."""
    go_on = MEAN_FILLER / (1 + MEAN_FILLER)
    # 1 - random() is never 0, so the logarithm is finite.
    return int(np.log(1 - random.random()) / np.log(go_on))
