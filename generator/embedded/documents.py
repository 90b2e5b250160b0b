"""Synthetic retrieval documents: records hidden in filler, a question about some of them, and how an answer is drawn.

A body of exactly ``length`` tokens opens with ``<bos>`` and holds five-token records at random places of a filler text:

- ``needle``: 16 records ``REC k v v' ;`` and a question about 5 of the keys;
- ``variable_tracking``: 15 records in 5 chains of three hops, ``REC k k' v ;``, ``REC k' k'' v' ;``,
  ``REC k'' v'' v''' ;``, in random order, and a question about 3 of the first keys.

The question is ``Q k ? k ? ... A``. A right answer states the requested items in any order: an ``A`` before each item
(the first ``A`` ends the prompt), the item's records without ``REC`` and ``;``, and a geometric number of filler
symbols after it. ``<eos>`` closes the answer. The order and the filler spread the answer's distribution out, so that
two sampled continuations differ.

All randomness comes from ``Generator.random``, whose numbers are the same under every version of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvdrift.generator.embedded import vocabulary as v
from kvdrift.schema.document import ALL_ANSWERS, Document
from kvdrift.schema.keyed_random import keyed_generator

TASKS = ("needle", "variable_tracking")
LENGTHS = (384, 768, 1536)

RECORD_TOKENS = 5
HOPS = 3
MEAN_FILLER = 4.5
"""Mean number of filler symbols after each item of an answer; with it an answer has about 43 tokens."""

SUCCESSORS = 4
_SUCCESSOR_CDF = (0.4, 0.7, 0.9)

_DOCUMENT_STREAM = "kvdrift/embedded/document"
_FILLER_STREAM = "kvdrift/embedded/filler"

Item = tuple[int, ...]
"""The tokens that state a requested item: three per record, with one record in a needle and three in a chain."""


@dataclass(frozen=True)
class PromptLayout:
    """The shape of a task's prompt.

    ``length`` is the number of tokens in its body, ``items`` the number of needles or chains, and ``asked`` how many of
    these the question is about.
    """

    task: str
    length: int
    items: int
    asked: int

    @property
    def records(self) -> int:
        """The number of records in the body."""
        return self.items * (1 if self.task == "needle" else HOPS)

    @property
    def shortest(self) -> int:
        """The number of tokens of a body without filler, the shortest that there is."""
        return 1 + RECORD_TOKENS * self.records


@dataclass(frozen=True)
class Episode:
    """A prompt (body and question) and the items that it asks for, in the order of the question."""

    prompt: tuple[int, ...]
    asked: tuple[Item, ...]


def study_layout(task: str, length: int) -> PromptLayout:
    """Return the layout that studies use for a task and a body of ``length`` tokens."""
    if task == "needle":
        return PromptLayout(task, length, items=16, asked=5)
    return PromptLayout(task, length, items=5, asked=3)


def make_document(task: str, length: int, index: int, seed: int) -> Document:
    """Return one document; equal arguments always give the same document.

    The prompt has ``length`` body tokens and a question of 12 (needle) or 8 (variable tracking) tokens. ``answers``
    holds one text for each requested item, in the order of the question.
    """
    layout = study_layout(task, length)
    episode = draw_episode(layout, named_stream(_DOCUMENT_STREAM, task, length, index, seed))
    doc = document_name(task, length, index)
    return Document(
        doc=doc, stratum=f"{task}-{length}", cluster=doc, task=task, source="embedded", tokens=episode.prompt,
        answers=tuple(v.to_text(item) for item in episode.asked), scoring=ALL_ANSWERS,
    )  # fmt: skip


def document_name(task: str, length: int, index: int) -> str:
    """Return the name of a task's document number ``index``."""
    return f"{task}-{length}-{index:05d}"


def named_stream(*parts: str | int) -> np.random.Generator:
    """Return the random generator that belongs to a name: the parts, joined by null characters."""
    return keyed_generator("\0".join(map(str, parts)))


def draw_distinct(random: np.random.Generator, size: int, count: int) -> list[int]:
    """Draw ``count`` distinct numbers below ``size``, in random order."""
    order: list[int] = np.argsort(random.random(size), kind="stable").tolist()
    return order[:count]


def _successor_table() -> list[list[int]]:
    """Return each filler symbol's successors, most probable first; the last row is for the start of a filler text."""
    random = named_stream(_FILLER_STREAM)
    return [
        [v.FIRST_FILLER + s for s in draw_distinct(random, v.FILLER_COUNT, SUCCESSORS)]
        for _ in range(v.FILLER_COUNT + 1)
    ]


_SUCCESSORS = _successor_table()


def draw_filler(random: np.random.Generator, count: int) -> list[int]:
    """Draw the first ``count`` symbols of a filler text, a Markov chain."""
    ranks: list[int] = np.searchsorted(_SUCCESSOR_CDF, random.random(count), side="right").tolist()
    symbols: list[int] = []
    row = v.FILLER_COUNT
    for rank in ranks:
        symbol = _SUCCESSORS[row][rank]
        symbols.append(symbol)
        row = symbol - v.FIRST_FILLER
    return symbols


def _draw_items(layout: PromptLayout, random: np.random.Generator) -> list[Item]:
    """Draw a document's items, three tokens per record; every record begins with another key, and no value repeats."""
    keys = [v.FIRST_KEY + key for key in draw_distinct(random, v.KEY_COUNT, layout.records)]
    values = [v.FIRST_VALUE + value for value in draw_distinct(random, v.VALUE_COUNT, v.VALUE_COUNT)]
    items: list[Item] = []
    for number in range(layout.items):
        if layout.task == "needle":
            items.append((keys[number], values[2 * number], values[2 * number + 1]))
        else:
            first, second, third = keys[HOPS * number : HOPS * (number + 1)]
            one, two, three, four = values[4 * number : 4 * (number + 1)]
            items.append((first, second, one, second, third, two, third, three, four))
    return items


def draw_episode(layout: PromptLayout, random: np.random.Generator) -> Episode:
    """Draw the body and the question of one document."""
    items = _draw_items(layout, random)
    records = [item[start : start + 3] for item in items for start in range(0, len(item), 3)]
    spare = layout.length - layout.shortest
    cuts = np.sort((random.random(len(records)) * (spare + 1)).astype(np.int64)).tolist()
    body = [v.BOS]
    written = 0
    for cut, place in zip(cuts, draw_distinct(random, len(records), len(records)), strict=True):
        body += [*draw_filler(random, cut - written), v.RECORD, *records[place], v.END]
        written = cut
    body += draw_filler(random, spare - written)

    queried = tuple(items[number] for number in draw_distinct(random, layout.items, layout.asked))
    question = [v.QUESTION]
    for item in queried:
        question += [item[0], v.MARK]
    return Episode(prompt=(*body, *question, v.ANSWER), asked=queried)
