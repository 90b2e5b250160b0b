"""Example trajectories as aligned text: the reference above the compressed model, by position.

The second screen has one pair under the best and under the worst action: the first pair, by document and replicate,
whose right answer the worst action loses; if no answer is lost, the first pair that diverges under the worst action.
The later section has the first document by id of each of the first strata, replicate 0, every compared action. The
split is the page's. Positions after the EOS of both sides are left out.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from kvdrift.report.printing.numbers import fixed
from kvdrift.report.reading.content import PageContent, TokenReader
from kvdrift.report.reading.estimates import ViewRow
from kvdrift.report.sections.choice import choose
from kvdrift.report.sections.section import Section
from kvdrift.schema.tables import COUPLED
from kvdrift.schema.token_texts import shown_texts

REPLICATE = 0
_STRATA = 3
_VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})
_VARIANTS = frozenset(map(chr, range(0xFE00, 0xFE10)))  # signs that choose another form of the character before them


def section(content: PageContent) -> Section | None:
    """Make the section on examples; None for finite-state systems, whose tokens are not text."""
    facts = content.facts
    if facts.finite:
        return None
    chosen = []
    for stratum in facts.strata[:_STRATA]:
        in_stratum = [row for row in facts.documents if row["stratum"] == stratum and row["split"] == content.split]
        chosen += in_stratum[:1]
    documents = [
        document for document in _documents(content, chosen, REPLICATE, content.actions) if document["examples"]
    ]
    return (
        Section("examples", "Examples", values={"documents": documents, "other": _other(content)})
        if documents
        else None
    )


def happens(content: PageContent) -> Section | None:
    """Make the section of the second screen; None for finite-state systems, and if no pair diverges."""
    choice = choose(content)
    if content.facts.finite or not choice.candidates:
        return None
    worst = choice.candidates[-1]
    best = next((action for action in (*choice.recommended, *choice.candidates) if action != worst), worst)
    pair = _first_pair(content, worst)
    if pair is None:
        return None
    doc, replicate, rule = pair
    (row,) = (row for row in content.facts.documents if row["doc"] == doc)
    (document,) = _documents(content, [row], replicate, list(dict.fromkeys((best, worst))))
    ends = (best, "the least R"), (worst, "the only action" if best == worst else "the largest R")
    roles = {action: "recommended" if action in choice.recommended else words for action, words in ends}
    examples = [
        example
        | {
            "role": roles[example["action"]],
            "scored": _scored(content, doc, replicate, example["action"]),
            "kept": _kept_record(content, doc, example["action"]),
            "link": "trajectories.html#" + urlencode({"doc": doc, "action": example["action"], "replicate": replicate}),
        }
        for example in document["examples"]
    ]
    values = {
        "document": document, "replicate": replicate, "rule": rule, "examples": examples, "other": _other(content)
    }  # fmt: skip
    return Section("happens", "What it does to a text", values=values)


def _first_pair(content: PageContent, worst: str) -> tuple[str, int, str] | None:
    """Return document and replicate of the first pair whose right answer the worst action loses, and why in words.

    If none is lost, it is the first pair that diverges under that action; None if none diverges.
    """
    where, key = {"split": content.split, "action": worst}, ("doc", "replicate")
    lost = content.source.columns_of("trajectory_answers", *key, **where, lost=1.0).to_pylist()
    if lost:
        first = min(lost, key=lambda row: (row["doc"], row["replicate"]))
        return first["doc"], first["replicate"], f"It is the first whose right answer {worst} loses."
    rows = content.source.columns_of("analyzed_trajectories", *key, "tau", **where).to_pylist()
    diverged = [row for row in rows if row["tau"] is not None]
    if not diverged:
        return None
    first = min(diverged, key=lambda row: (row["doc"], row["replicate"]))
    return first["doc"], first["replicate"], f"It is the first that diverges under {worst}."


def _scored(content: PageContent, doc: str, replicate: int, action: str) -> str:
    """Say how the answers of Y are scored beside those of X; empty if the pair is not scored."""
    rows = content.source.of("scores", doc=doc, replicate=replicate, action=action)
    if not rows:
        return ""
    return f"states {fixed(100 * rows[0]['score_y'], 0)}% of the answers, X {fixed(100 * rows[0]['score_x'], 0)}%"


def _kept_record(content: PageContent, doc: str, action: str) -> str:
    """Say how much an action keeps of the parts of the prompt that state the answers; empty if that is not stored."""
    rows = content.source.of("answer_records", doc=doc, action=action)
    if not rows:
        return ""
    least = min(row["kept"] for row in rows)
    return f"keeps {'all' if least == 1 else f'at least {fixed(100 * least, 0)}%'} of each answer’s record"


def _other(content: PageContent) -> str:
    return "compressed" if content.facts.other == "the compressed model" else "action"


def visible(text: str) -> str:
    """Show a token's line breaks and tabs as symbols, one of invisible signs as their numbers, an empty one as ∅."""
    if text and all(unicodedata.category(sign) == "Cf" or sign in _VARIANTS for sign in text):
        return "".join(f"U+{ord(sign):04X}" for sign in text)
    return text.translate(_VISIBLE) or "∅"


def _documents(
    content: PageContent, chosen: list[ViewRow], replicate: int, actions: list[str]
) -> Iterator[dict[str, Any]]:
    """Read the examples of documents, all in two queries, since a query may read a file for each unit."""
    where = {"doc": [row["doc"] for row in chosen], "replicate": replicate, "action": actions}
    trajectories = {(row["doc"], row["action"]): row for row in content.source.of("trajectories", **where)}
    events: dict[tuple[str, str], list[ViewRow]] = defaultdict(list)
    for event in sorted(content.source.of("events", kind=COUPLED, **where), key=lambda event: int(event["t"])):
        events[event["doc"], event["action"]].append(event)
    for row in chosen:
        keys = [(row["doc"], action) for action in actions]
        examples = [
            _example(trajectories[key], events[key], content.token_text, _other(content))
            for key in keys if key in trajectories and key in events
        ]  # fmt: skip
        yield {**{name: row[name] for name in ("doc", "stratum", "task", "answers")}, "examples": examples}


def _example(trajectory: ViewRow, events: list[ViewRow], token_text: TokenReader, other: str) -> dict[str, Any]:
    """Return a coupled pair of continuations as the template reads it.

    The mark of a side at a position is ``s`` at its EOS, and ``z`` after it.
    """
    tau, eos_x, eos_y = trajectory["tau"], trajectory["eos_x"], trajectory["eos_y"]
    last = max(eos_x, eos_y) if eos_x is not None and eos_y is not None else trajectory["horizon"]
    events = [event for event in events if event["t"] <= last]
    x, y = (shown_texts([token_text(event[side]) for event in events]) for side in ("x_token", "y_token"))
    pairs = [
        {
            "t": event["t"], "x": visible(x_text), "y": visible(y_text),
            "mismatch": event["x_token"] != event["y_token"], "entry": event["t"] == tau,
            "x_mark": _mark(event["t"], eos_x), "y_mark": _mark(event["t"], eos_y),
        }
        for event, x_text, y_text in zip(events, x, y, strict=True)
    ]  # fmt: skip
    written = min(last, trajectory["horizon"])
    story = f"first mismatch at τ = {tau}, {trajectory['mismatches']} of {written} written tokens differ"
    if tau is None:
        story = f"agrees through position {trajectory['horizon']}"
    summary = f"{story}; {_end('reference', eos_x)}, {_end(other, eos_y)}"
    return {"action": trajectory["action"], "summary": summary, "pairs": pairs}


def _mark(t: int, eos: int | None) -> str:
    if eos is None or t < eos:
        return ""
    return "s" if t == eos else "z"


def _end(side: str, position: int | None) -> str:
    return f"{side} does not end" if position is None else f"{side} ends at {position}"
