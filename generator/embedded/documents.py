"""Synthetic retrieval documents: records hidden in filler, a question about some of them, and how an answer is drawn.

A body of exactly ``length`` tokens opens with ``<bos>`` and holds five-token records cut into a filler text:

- ``needle``: 16 records ``REC k v v' ;`` and a question about 5 of the keys;
- ``variable_tracking``: 15 records in 5 chains of three hops, ``REC k k' v ;``, ``REC k' k'' v' ;``,
  ``REC k'' v'' v''' ;``, in shuffled places, and a question about 3 of the first keys.

The question is ``Q k ? k ? ... A``. A right answer states the asked items in any order, each after an ``A`` (the prompt
ends with the first), as its records without ``REC`` and ``;``, and followed by a geometric number of filler symbols;
``<eos>`` closes it. The order and the filler spread the answer's law out, so that two sampled continuations differ.

Every draw is a function of ``Generator.random`` alone, whose stream for Philox is fixed, so that a document does not
depend on the version of numpy's other distributions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from generator.embedded import vocabulary as v
from schema.document import Document
from schema.keyed_random import keyed_generator

TASKS = ("needle", "variable_tracking")
LENGTHS = (384, 768, 1536)

RECORD_TOKENS = 5
HOPS = 3
MEAN_FILLER = 4.5
"""Mean number of filler symbols after each item of an answer; with it an answer has about 43 tokens."""

SUCCESSORS = 4
_SUCCESSOR_CDF = (0.4, 0.7, 0.9)

_DOCUMENT_DOMAIN = "kvdrift/embedded/document"
_TRAINING_DOMAIN = "kvdrift/embedded/training"
_FILLER_DOMAIN = "kvdrift/embedded/filler"

Item = tuple[int, ...]
"""The tokens that state one asked item: three per record, one record in a needle item and three in a chain."""


@dataclass(frozen=True)
class Layout:
    """The shape of a document: ``length`` body tokens, ``items`` needles or chains in them, ``asked`` of them asked."""

    task: str
    length: int
    items: int
    asked: int

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task {self.task!r} is not one of {', '.join(TASKS)}")
        if not 1 <= self.asked <= self.items:
            raise ValueError(f"{self.asked} asked items of {self.items}: ask at least 1 and at most all of them")
        if self.length < self.shortest:
            raise ValueError(f"a {self.task} body needs at least {self.shortest} tokens, not {self.length}")

    @property
    def records(self) -> int:
        """Number of records in the body."""
        return self.items * (1 if self.task == "needle" else HOPS)

    @property
    def shortest(self) -> int:
        """Tokens of a body without any filler."""
        return 1 + RECORD_TOKENS * self.records


@dataclass(frozen=True)
class Episode:
    """A prompt with its asked items: ``prompt`` is body and question, n token ids."""

    prompt: tuple[int, ...]
    asked: tuple[Item, ...]


@dataclass(frozen=True)
class TrainingSequence:
    """A prompt with one right answer: ``tokens[:prompt_tokens]`` is the prompt.

    ``choices`` are the positions of ``tokens`` that depend on what is already answered, each with what may stand there
    besides filler: after an ``A`` the first keys of the items that are left; after an item and its filler another
    ``A``, or ``<eos>`` when no item is left. ``contents`` are the positions of the items after their first, whose
    tokens the prompt determines.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    choices: tuple[tuple[int, tuple[int, ...]], ...]
    contents: tuple[int, ...]


def study_layout(task: str, length: int) -> Layout:
    """The layout that studies use; ``ValueError`` for an unknown task or a body too short for its records."""
    if task == "needle":
        return Layout(task, length, items=16, asked=5)
    return Layout(task, length, items=5, asked=3)


def make_document(task: str, length: int, index: int, seed: int) -> Document:
    """The document number ``index`` of a task and body length under a seed, always the same one.

    The prompt has ``length`` body tokens and a question of 12 (needle) or 8 (variable tracking) tokens. ``answers``
    holds one text per asked item, in the order of the question. ``ValueError`` for an unknown task, a negative index
    or a body too short for its records.
    """
    if index < 0:
        raise ValueError(f"document index {index} is negative")
    layout = study_layout(task, length)
    episode = _compose(layout, _stream(_DOCUMENT_DOMAIN, task, length, index, seed))
    doc = document_name(task, length, index)
    return Document(
        doc=doc,
        stratum=f"{task}-{length}",
        cluster=doc,
        task=task,
        source="embedded",
        tokens=episode.prompt,
        answers=tuple(v.to_text(item) for item in episode.asked),
    )


def document_name(task: str, length: int, index: int) -> str:
    """The name of document number ``index``."""
    return f"{task}-{length}-{index:05d}"


def make_training_sequence(layout: Layout, index: int, seed: int) -> TrainingSequence:
    """The training sequence number ``index`` of a layout under a seed.

    Its stream has another domain than that of ``make_document``: no seed makes a study document out of it.
    """
    random = _stream(_TRAINING_DOMAIN, layout.task, layout.length, layout.items, layout.asked, index, seed)
    episode = _compose(layout, random)
    return _answered(episode, random)


def _stream(domain: str, *parts: str | int) -> np.random.Generator:
    """The random stream of a domain and parts."""
    return keyed_generator("\0".join([domain, *map(str, parts)]))


def _distinct(random: np.random.Generator, size: int, count: int) -> list[int]:
    """``count`` distinct numbers below ``size``, in random order."""
    order: list[int] = np.argsort(random.random(size), kind="stable").tolist()
    return order[:count]


def _filler_table() -> list[list[int]]:
    """Successors of each filler symbol, most probable first; the last row is for what follows a record or the start."""
    random = _stream(_FILLER_DOMAIN)
    return [[v.FIRST_FILLER + s for s in _distinct(random, v.FILLERS, SUCCESSORS)] for _ in range(v.FILLERS + 1)]


_TABLE = _filler_table()


def _filler(random: np.random.Generator, count: int) -> list[int]:
    """``count`` symbols of the filler chain from its start."""
    ranks: list[int] = np.searchsorted(_SUCCESSOR_CDF, random.random(count), side="right").tolist()
    symbols: list[int] = []
    row = v.FILLERS
    for rank in ranks:
        symbol = _TABLE[row][rank]
        symbols.append(symbol)
        row = symbol - v.FIRST_FILLER
    return symbols


def _draw_items(layout: Layout, random: np.random.Generator) -> list[Item]:
    """The items of a document, three tokens per record; no key opens two records and no value stands twice."""
    keys = [v.FIRST_KEY + key for key in _distinct(random, v.KEYS, layout.records)]
    values = [v.FIRST_VALUE + value for value in _distinct(random, v.VALUES, v.VALUES)]
    items: list[Item] = []
    for number in range(layout.items):
        if layout.task == "needle":
            items.append((keys[number], values[2 * number], values[2 * number + 1]))
        else:
            first, second, third = keys[HOPS * number : HOPS * (number + 1)]
            one, two, three, four = values[4 * number : 4 * (number + 1)]
            items.append((first, second, one, second, third, two, third, three, four))
    return items


def _compose(layout: Layout, random: np.random.Generator) -> Episode:
    """Body and question of one document."""
    items = _draw_items(layout, random)
    records = [item[start : start + 3] for item in items for start in range(0, len(item), 3)]
    spare = layout.length - layout.shortest
    cuts = np.sort((random.random(len(records)) * (spare + 1)).astype(np.int64)).tolist()
    body = [v.BOS]
    written = 0
    for cut, place in zip(cuts, _distinct(random, len(records), len(records)), strict=True):
        body += [*_filler(random, cut - written), v.RECORD, *records[place], v.END]
        written = cut
    body += _filler(random, spare - written)

    asked = tuple(items[number] for number in _distinct(random, layout.items, layout.asked))
    question = [v.QUESTION]
    for item in asked:
        question += [item[0], v.MARK]
    return Episode(prompt=(*body, *question, v.ANSWER), asked=asked)


def _answered(episode: Episode, random: np.random.Generator) -> TrainingSequence:
    """An episode with one right answer drawn at random."""
    tokens = list(episode.prompt)
    left = [episode.asked[number] for number in _distinct(random, len(episode.asked), len(episode.asked))]
    choices: list[tuple[int, tuple[int, ...]]] = []
    contents: list[int] = []
    while left:
        choices.append((len(tokens), tuple(item[0] for item in left)))
        item = left.pop()
        contents += range(len(tokens) + 1, len(tokens) + len(item))
        tokens += item
        filler = _filler(random, _geometric(random))
        closing = v.ANSWER if left else v.EOS
        choices += [(len(tokens) + step, (closing,)) for step in range(len(filler) + 1)]
        tokens += [*filler, closing]
    return TrainingSequence(tuple(tokens), len(episode.prompt), tuple(choices), tuple(contents))


def _geometric(random: np.random.Generator) -> int:
    """A geometric count from 0 on with mean ``MEAN_FILLER``."""
    go_on = MEAN_FILLER / (1 + MEAN_FILLER)
    # 1 - random() is never 0, so the logarithm is finite.
    return int(np.log(1 - random.random()) / np.log(go_on))
