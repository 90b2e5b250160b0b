"""The section with example trajectories as aligned text: the reference above the compressed model, by position.

Examples are chosen by a rule: the first document by id of each of the first strata, replicate 0, every compared action.
The split is the page's. Positions after the EOS of both sides are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from kvdrift.report.reading.content import PageContent, TokenReader
from kvdrift.report.reading.estimates import ViewRow
from kvdrift.report.sections.section import Section
from kvdrift.schema.tables import COUPLED

REPLICATE = 0
_STRATA = 3
_VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})


def section(content: PageContent) -> Section | None:
    """Make the section on examples; None for finite-state systems, whose tokens are not text."""
    facts = content.facts
    if facts.finite:
        return None
    chosen = []
    for stratum in facts.strata[:_STRATA]:
        in_stratum = [row for row in facts.documents if row["stratum"] == stratum and row["split"] == content.split]
        chosen += in_stratum[:1]
    documents = [document for document in _documents(content, chosen) if document["examples"]]
    return (
        Section("examples", "Examples", values={"documents": documents, "other": _other(content)})
        if documents
        else None
    )


def _other(content: PageContent) -> str:
    """Return the word for the side whose text stands below."""
    return "compressed" if content.facts.other == "the compressed model" else "action"


def visible(text: str) -> str:
    """Show a token's line breaks and tabs as symbols, and an empty token as ∅."""
    return text.translate(_VISIBLE) or "∅"


def _documents(content: PageContent, chosen: list[ViewRow]) -> Iterator[dict[str, Any]]:
    """Read the examples of documents, all in two queries, since a query may read a file for each unit."""
    where = {"doc": [row["doc"] for row in chosen], "replicate": REPLICATE}
    trajectories = {(row["doc"], row["action"]): row for row in content.source.of("trajectories", **where)}
    events: dict[tuple[str, str], list[ViewRow]] = defaultdict(list)
    for event in sorted(content.source.of("events", kind=COUPLED, **where), key=lambda event: int(event["t"])):
        events[event["doc"], event["action"]].append(event)
    for row in chosen:
        keys = [(row["doc"], action) for action in content.actions]
        examples = [
            _example(trajectories[key], events[key], content.token_text, _other(content))
            for key in keys if key in trajectories and key in events
        ]  # fmt: skip
        yield {**{name: row[name] for name in ("doc", "stratum", "task", "answers")}, "examples": examples}


def _example(trajectory: ViewRow, events: list[ViewRow], token_text: TokenReader, other: str) -> dict[str, Any]:
    """Return a coupled pair of continuations for the template: a mark is ``s`` at a side's EOS, ``z`` after it."""
    tau, eos_x, eos_y = trajectory["tau"], trajectory["eos_x"], trajectory["eos_y"]
    last = max(eos_x, eos_y) if eos_x is not None and eos_y is not None else trajectory["horizon"]
    pairs = [
        {
            "t": t, "x": visible(token_text(x)), "y": visible(token_text(y)), "mismatch": x != y, "entry": t == tau,
            "x_mark": _mark(t, eos_x), "y_mark": _mark(t, eos_y),
        }
        for t, x, y in ((event["t"], event["x_token"], event["y_token"]) for event in events) if t <= last
    ]  # fmt: skip
    mismatches, horizon = trajectory["mismatches"], trajectory["horizon"]
    story = f"first mismatch at τ = {tau}, {mismatches} of {horizon} positions differ"
    if tau is None:
        story = f"agrees through position {horizon}"
    summary = f"{story}; {_end('reference', eos_x)}, {_end(other, eos_y)}"
    return {"action": trajectory["action"], "summary": summary, "pairs": pairs}


def _mark(t: int, eos: int | None) -> str:
    if eos is None or t < eos:
        return ""
    return "s" if t == eos else "z"


def _end(side: str, position: int | None) -> str:
    return f"{side} does not end" if position is None else f"{side} ends at {position}"
