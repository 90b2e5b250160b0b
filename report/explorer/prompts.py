"""The prompts of the explorer's documents, packed one by one, so that the page unpacks only the prompt that it shows.

A document's text is base64 of gzip of, one after the other:

    tokens     token index [n]           indices into the manifest's ``tokens``, 2 or 4 bytes as for X and Y
    shares     byte [groups, n]          for each action and step, in the manifest's order

A share is 255 times the fraction of the (layer, KV head) pairs of a group of layers that keep the entry: only 0 means
none, and only 255 means all. Bytes of token indices are grouped by their place in the number, the lowest first.

The prompts are chosen in this order, up to ``MOST_BYTES``:

1. the documents that jumps lead to, in the order of the jumps;
2. all other documents of the sample, the first of each stratum, then the second, and so on.

Layers are put in fewer groups if a prompt has more than ``MOST_SHARES`` of layers times positions.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.report.explorer.sample import Sample
from kvdrift.report.explorer.trajectories import Ints, Outcomes
from kvdrift.report.reading.estimates import StudyRows, ViewRow

MOST_BYTES: Final = 1_500_000
"""Of all prompts, as text."""

MOST_SHARES: Final = 1 << 16
"""Of one prompt, action and step."""


_AT_ONCE = 16
_ENOUGH = 32 * MOST_BYTES  # bytes before compression, of which ``MOST_BYTES`` can never hold more


@dataclass(frozen=True)
class Prompt:
    """A stored prompt, and the entries that actions keep."""

    place: int  # the index of its document in the outcomes
    tokens: NDArray[np.int32]  # int32[n]
    records: list[list[int]]  # the positions of its answers' records: rows of answer, piece, first and last
    layers: int  # number of layers of the model; 0 if unknown
    kept: list[Kept]  # the kept entries after each counted step of each action
    turns: list[tuple[str, int]]  # the role of each turn that a chat template wrote, and its first position


@dataclass(frozen=True)
class Kept:
    """The entries of a prompt that an action keeps after a counted step."""

    action: int  # the index of the action in the outcomes
    step: int  # 0 after prefill
    first_layers: list[int]  # the first layer of each group
    shares: NDArray[np.uint8]  # uint8[groups, n]


def read_prompts(source: StudyRows, outcomes: Outcomes, sample: Sample) -> list[Prompt]:
    """Read the stored prompts of a sample's documents in the order of the rule above; none if none are stored."""
    order = _order(outcomes, sample)
    found = dict[int, Prompt]()
    for places in (order[at : at + _AT_ONCE] for at in range(0, len(order), _AT_ONCE)):
        names = {outcomes.documents[place]["doc"]: place for place in places}
        rows = dict[str, list[ViewRow]]()
        for row in source.of("prompts", doc=[*names]):
            rows.setdefault(row["doc"], []).append(row)
        found |= {names[doc]: prompt for doc, own in rows.items() if (prompt := _prompt(outcomes, names[doc], own))}
        if sum(prompt.tokens.size * (2 + len(prompt.kept)) for prompt in found.values()) > _ENOUGH:
            break
    return [found[place] for place in order if place in found]


def pack_prompts(prompts: list[Prompt], tokens: NDArray[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Pack prompts, in the order of the rule, while there is room: the manifest's entry and the text of each.

    The sorted tokens of the manifest include those of the prompts.
    """
    kind = np.dtype("<u2" if len(tokens) <= 1 << 16 else "<u4")
    said, texts, room = [], list[str](), MOST_BYTES
    for prompt in prompts:
        index = np.searchsorted(tokens, prompt.tokens).astype(kind)
        planes = index.view(np.uint8).reshape(-1, kind.itemsize).T.tobytes()
        data = planes + b"".join(kept.shares.tobytes() for kept in prompt.kept)
        text = base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")
        if len(text) > room:
            break
        room -= len(text)
        texts.append(text)
        kept = [[one.action, one.step, one.first_layers] for one in prompt.kept]
        said.append(
            {
                "place": prompt.place, "entries": len(index), "records": prompt.records, "kept": kept,
                "turns": prompt.turns,
            }
        )  # fmt: skip
    return said, texts


def _order(outcomes: Outcomes, sample: Sample) -> list[int]:
    """Return the indices of the sample's documents, in the order of the rule."""
    led = [int(outcomes.doc[row]) for jump in sample.jumps for row in jump.rows]
    places = np.unique(outcomes.doc[sample.rows])
    turn = np.zeros(len(places), np.int64)
    for stratum in range(len(outcomes.strata)):
        own = np.flatnonzero(outcomes.stratum[places] == stratum)
        turn[own] = np.arange(len(own))
    rest: Ints = places[np.lexsort((places, turn))]
    return list(dict.fromkeys([*led, *rest.tolist()]))


def _prompt(outcomes: Outcomes, place: int, rows: list[ViewRow]) -> Prompt | None:
    """Assemble the prompt of a document from its rows; None if its tokens are not stored."""
    own = [row for row in rows if row["action"] is None]
    if not own:
        return None
    newest = max(own, key=lambda row: int(row["document_revision"]))
    tokens = np.array(newest["tokens"], np.int32)
    records = [[record[name] for name in ("answer", "piece", "first", "last")] for record in newest["records"] or ()]
    kept = [
        Kept(outcomes.actions.index(row["action"]), int(row["step"]), *_shares(row, len(tokens)))
        for row in rows
        if row["action"] in outcomes.actions
    ]
    layers = max((row["layers"] or 0 for row in rows), default=0)
    turns = [(str(turn["role"]), int(turn["first"])) for turn in newest["turns"] or ()]
    return Prompt(place, tokens, records, layers, sorted(kept, key=lambda one: (one.action, one.step)), turns)


def _shares(row: ViewRow, entries: int) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the first layer of each group and the groups' shares; groups are joined if they are too many."""
    counts = np.array(row["kept"], np.int64).reshape(-1, entries)
    layers, groups = int(row["layers"]), len(counts)
    fewer = max(1, min(groups, MOST_SHARES // entries))
    joined = [group * groups // fewer for group in range(fewer)]
    first_layers = [group * layers // groups for group in joined]
    pairs = int(row["pairs"]) // layers * np.diff([*first_layers, layers])[:, None]
    counts = np.add.reduceat(counts, joined, axis=0)
    shares = np.rint(255 * counts / pairs).clip(1, 254)
    return first_layers, np.where(counts == 0, 0, np.where(counts == pairs, 255, shares)).astype(np.uint8)
