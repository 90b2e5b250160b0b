"""Example trajectories as aligned text: the reference over the compressed model, position by position.

The rule, so that nobody picks: of the first strata in order the first document by id, of the split that the page
shows, replicate 0, every compared action. A position after both sides' EOS is not shown: both are absorbed there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from report.reading.facts import Facts
from report.reading.source import Row, StudyRows

REPLICATE = 0
_VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})


@dataclass(frozen=True)
class Pair:
    """One position: both tokens as text, and what happens there. A mark is ``s`` at a side's EOS, ``z`` after it."""

    t: int
    x: str
    y: str
    mismatch: bool
    entry: bool
    x_mark: str
    y_mark: str


@dataclass(frozen=True)
class Example:
    """One coupled pair of continuations."""

    action: str
    tau: int | None
    eos_x: int | None
    eos_y: int | None
    mismatches: int
    horizon: int
    pairs: tuple[Pair, ...]

    @property
    def summary(self) -> str:
        """What happens, in one line."""
        if self.tau is None:
            story = f"agrees through position {self.horizon}"
        else:
            story = f"first mismatch at τ = {self.tau}, {self.mismatches} of {self.horizon} positions differ"
        return f"{story}; {_end('reference', self.eos_x)}, {_end('compressed', self.eos_y)}"


@dataclass(frozen=True)
class ExampleDocument:
    """One document with its examples."""

    doc: str
    stratum: str
    task: str
    answers: tuple[str, ...]
    examples: tuple[Example, ...]


def read_examples(
    source: StudyRows, facts: Facts, actions: list[str], token_text: Callable[[int], str], strata: int, split: str
) -> list[ExampleDocument]:
    """Examples of the first ``strata`` strata, by the rule above."""
    chosen = []
    for stratum in facts.strata[:strata]:
        documents = [row for row in facts.documents if row["stratum"] == stratum and row["split"] == split]
        if documents:
            chosen.append(documents[0])
    shown = [_document(source, row, actions, token_text) for row in chosen]
    return [document for document in shown if document.examples]


def visible(text: str) -> str:
    """A token's text with line breaks and tabs as symbols; an empty token is ∅."""
    return text.translate(_VISIBLE) or "∅"


def _document(source: StudyRows, row: Row, actions: list[str], token_text: Callable[[int], str]) -> ExampleDocument:
    where = {"doc": row["doc"], "replicate": REPLICATE}
    trajectories = {found["action"]: found for found in source.of("trajectories", **where)}
    events: dict[str, list[Row]] = {}
    for event in source.of("events", **where):
        events.setdefault(event["action"], []).append(event)
    examples = tuple(
        _example(trajectories[action], sorted(events[action], key=lambda event: int(event["t"])), token_text)
        for action in actions
        if action in trajectories and action in events
    )
    answers = tuple(row.get("answers") or ())
    return ExampleDocument(row["doc"], row["stratum"], row.get("task") or "", answers, examples)


def _example(trajectory: Row, events: list[Row], token_text: Callable[[int], str]) -> Example:
    tau, eos_x, eos_y = trajectory["tau"], trajectory["eos_x"], trajectory["eos_y"]
    last = max(eos_x, eos_y) if eos_x is not None and eos_y is not None else trajectory["horizon"]
    pairs = tuple(
        Pair(
            t=event["t"],
            x=visible(token_text(event["x_token"])),
            y=visible(token_text(event["y_token"])),
            mismatch=event["x_token"] != event["y_token"],
            entry=event["t"] == tau,
            x_mark=_mark(event["t"], eos_x),
            y_mark=_mark(event["t"], eos_y),
        )
        for event in events
        if event["t"] <= last
    )
    return Example(trajectory["action"], tau, eos_x, eos_y, trajectory["mismatches"], trajectory["horizon"], pairs)


def _mark(t: int, eos: int | None) -> str:
    if eos is None or t < eos:
        return ""
    return "s" if t == eos else "z"


def _end(side: str, position: int | None) -> str:
    return f"{side} goes on" if position is None else f"{side} ends at {position}"
