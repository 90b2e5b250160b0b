"""The trajectory explorer: one HTML file that opens from ``file://`` and contains all its data.

The file has two texts, each gzip in base64: a manifest in JSON, and arrays of numbers, one after the other. With n
trajectories of H positions and s different streams of X, the arrays are:

    x      token index [s, H]     indices into the manifest's ``tokens``
    y      token index [n, H]
    delta  float32     [n, H]
    f      float32     [n, H]     the bits of f xor those of delta: 0 while the histories are equal

A token index has 2 bytes, or 4 if there are more than 65,536 different tokens. The bytes of an array are grouped by
their place in the number, the lowest first, since such arrays compress better. ``packed.js`` reads both texts.

The prompts are packed one by one, so that the page unpacks only the prompt that it shows. The text of a prompt of m
tokens is gzip in base64 of these arrays, one after the other:

    tokens     token index [m]           indices into the manifest's ``tokens``, 2 or 4 bytes as for X and Y
    shares     byte [groups, m]          for each action and step, in the manifest's order

A share is 255 times the fraction of the (layer, KV head) pairs of a group of layers that keep the entry: only 0 means
none, and only 255 means all.

The prompts are chosen in this order, up to ``MOST_BYTES``:

1. the documents that jumps (buttons of the page) lead to, in the order of the jumps;
2. all other documents of the sample, the first of each stratum, then the second, and so on.

Groups of layers are joined if a prompt has more than ``MOST_SHARES`` shares for an action and step.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.report.explorer.trajectories import (
    SCORED,
    Ints,
    Outcomes,
    Sample,
    Streams,
    choose,
    read_outcomes,
    read_streams,
)
from kvdrift.report.printing.html import rendered
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import StudyRows, ViewRow

MOST_BYTES: Final = 1_500_000
"""Most bytes of all prompts together, as text."""

MOST_SHARES: Final = 1 << 16
"""Most shares of one prompt, action and step."""
_AT_ONCE = 16  # documents whose prompts are read by one query
_ENOUGH = 32 * MOST_BYTES  # bytes before compression; prompts beyond these never fit into ``MOST_BYTES``
EXPLORER = "trajectories.html"
_TEMPLATES = Path(__file__).parents[1] / "templates" / "explorer"
_SCRIPTS = ("words", "packed", "overview", "score", "prompt", "explorer")
"""Files that are concatenated into the page's script."""


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
    """The entries of a prompt that an action keeps after one of the steps at which entries are counted."""

    action: int  # the index of the action in the outcomes
    step: int  # 0 after prefill
    first_layers: list[int]  # the first layer of each group
    shares: NDArray[np.uint8]  # uint8[groups, n]


def read_prompts(source: StudyRows, outcomes: Outcomes, sample: Sample) -> list[Prompt]:
    """Read the stored prompts of a sample's documents, those that jumps lead to first.

    Reading stops when surely no further prompt fits into ``MOST_BYTES``.
    """
    order = _order(outcomes, sample)
    prompts = dict[int, Prompt]()
    for places in (order[at : at + _AT_ONCE] for at in range(0, len(order), _AT_ONCE)):
        names = {outcomes.documents[place]["doc"]: place for place in places}
        rows = dict[str, list[ViewRow]]()
        for row in source.of("prompts", doc=[*names]):
            rows.setdefault(row["doc"], []).append(row)
        prompts |= {
            names[doc]: prompt
            for doc, document_rows in rows.items()
            if (prompt := _prompt(outcomes, names[doc], document_rows))
        }
        if sum(prompt.tokens.size * (2 + len(prompt.kept)) for prompt in prompts.values()) > _ENOUGH:
            break
    return [prompts[place] for place in order if place in prompts]


def pack_prompts(prompts: list[Prompt], tokens: NDArray[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Pack prompts in turn until ``MOST_BYTES`` are full; return a manifest entry and a text for each packed prompt.

    ``tokens`` are the manifest's tokens, sorted, which include those of the prompts.
    """
    kind = np.dtype("<u2" if len(tokens) <= 1 << 16 else "<u4")
    manifest_entries, texts, room = [], list[str](), MOST_BYTES
    for prompt in prompts:
        index = np.searchsorted(tokens, prompt.tokens).astype(kind)
        text = _text(_planes(index) + b"".join(kept.shares.tobytes() for kept in prompt.kept))
        if len(text) > room:
            break
        room -= len(text)
        texts.append(text)
        kept = [[kept_entries.action, kept_entries.step, kept_entries.first_layers] for kept_entries in prompt.kept]
        manifest_entries.append(
            {
                "place": prompt.place, "entries": len(index), "records": prompt.records, "kept": kept,
                "turns": prompt.turns,
            }
        )  # fmt: skip
    return manifest_entries, texts


def _order(outcomes: Outcomes, sample: Sample) -> list[int]:
    """Return the indices of the sample's documents: first those that jumps lead to, in the order of the jumps.

    After them come all others: the first document of each stratum, then the second of each, and so on.
    """
    led = [int(outcomes.doc[row]) for jump in sample.jumps for row in jump.rows]
    places = np.unique(outcomes.doc[sample.rows])
    rest: Ints = places[np.lexsort((places, outcomes.turns[places]))]
    return list(dict.fromkeys([*led, *rest.tolist()]))


def _prompt(outcomes: Outcomes, place: int, rows: list[ViewRow]) -> Prompt | None:
    """Assemble the prompt of a document from its rows; None if its tokens are not stored."""
    prompt_rows = [row for row in rows if row["action"] is None]
    if not prompt_rows:
        return None
    newest = max(prompt_rows, key=lambda row: int(row["document_revision"]))
    tokens = np.array(newest["tokens"], np.int32)
    records = [[record[name] for name in ("answer", "piece", "first", "last")] for record in newest["records"] or ()]
    kept = [
        Kept(outcomes.actions.index(row["action"]), int(row["step"]), *_shares(row, len(tokens)))
        for row in rows
        if row["action"] in outcomes.actions
    ]
    layers = max((row["layers"] or 0 for row in rows), default=0)
    turns = [(str(turn["role"]), int(turn["first"])) for turn in newest["turns"] or ()]
    kept.sort(key=lambda kept_entries: (kept_entries.action, kept_entries.step))
    return Prompt(place, tokens, records, layers, kept, turns)


def _shares(row: ViewRow, entries: int) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the first layer of each group of layers, and for each group the shares of its heads that keep an entry.

    The shares are 0 to 255, as the module's docstring defines them, uint8[groups, ``entries``]. Neighbouring groups are
    joined if there would be more than ``MOST_SHARES`` shares.
    """
    counts = np.array(row["kept"], np.int64).reshape(-1, entries)
    layers, groups = int(row["layers"]), len(counts)
    fewer = max(1, min(groups, MOST_SHARES // entries))
    joined = [group * groups // fewer for group in range(fewer)]
    first_layers = [group * layers // groups for group in joined]
    pairs = int(row["pairs"]) // layers * np.diff([*first_layers, layers])[:, None]
    counts = np.add.reduceat(counts, joined, axis=0)
    shares = np.rint(255 * counts / pairs).clip(1, 254)
    return first_layers, np.where(counts == 0, 0, np.where(counts == pairs, 255, shares)).astype(np.uint8)


@dataclass(frozen=True)
class Packed:
    """The data of the page as texts in base64: the manifest, the arrays, and each prompt."""

    manifest: str
    arrays: str
    prompts: tuple[str, ...] = ()


def pack(
    outcomes: Outcomes,
    sample: Sample,
    streams: Streams,
    token_text: Callable[[int], str] | None,
    names: dict[str, str],
    prompts: Sequence[Prompt] = (),
) -> Packed:
    """Pack a sample of trajectories as texts; the same input gives the same texts.

    Without ``token_text`` the page shows token ids. ``names`` are further entries of the manifest about the study. As
    many prompts are packed, in their order, as fit into ``MOST_BYTES``.
    """
    drawn = np.stack([streams.x, streams.y])
    tokens = np.unique(np.concatenate([drawn.ravel(), *(prompt.tokens for prompt in prompts)]))
    x, y = np.searchsorted(tokens, drawn)
    first, reference = _references(outcomes, sample.rows, x)
    kind = np.dtype("<u2" if len(tokens) <= 1 << 16 else "<u4")
    delta, f = (values.astype("<f4").view("<u4") for values in (streams.delta, streams.f))
    places = np.unique(outcomes.doc[sample.rows]).tolist()
    manifest_entries, prompt_texts = pack_prompts([*prompts], tokens)
    arrays = b"".join(map(_planes, (x[first].astype(kind), y.astype(kind), delta, f ^ delta)))
    manifest = names | {
        "horizon": outcomes.horizon,
        "strata": outcomes.strata,
        "actions": outcomes.actions,
        "documents": _documents(outcomes, sample.rows),
        "tokens": tokens.tolist(),
        "texts": None if token_text is None else [token_text(token) for token in tokens.tolist()],
        "references": len(first),
        "trajectories": _trajectories(outcomes, sample.rows, streams, reference),
        "jumps": _jumps(sample),
        "total": len(outcomes),
        "layers": next((prompt.layers for prompt in prompts if prompt.layers), None),
        "stored": bool(prompts),
        "prompts": [{"document": places.index(entry.pop("place"))} | entry for entry in manifest_entries],
    }
    # Tokens may be halves of characters; JSON escapes carry them.
    held = json.dumps(manifest, separators=(",", ":")).encode("ascii")
    return Packed(_text(held), _text(arrays), tuple(prompt_texts))


def _references(outcomes: Outcomes, rows: Ints, x: Ints) -> tuple[list[int], list[int]]:
    """Return the index of the first trajectory of each distinct X, and the number of each trajectory's X.

    ``rows`` are the sampled rows of ``outcomes``; ``x`` has their tokens of X as indices, [n, H].
    Actions share X's stream on a document and replicate; a log of another generator may have a stream for each action.
    """
    first, reference = list[int](), list[int]()
    known: dict[tuple[int, int, bytes], int] = {}
    for at, row in enumerate(rows.tolist()):
        key = (int(outcomes.doc[row]), int(outcomes.replicate[row]), x[at].tobytes())
        if key not in known:
            known[key] = len(first)
            first.append(at)
        reference.append(known[key])
    return first, reference


def _documents(outcomes: Outcomes, rows: Ints) -> list[dict[str, Any]]:
    return [
        {
            "place": place,
            "doc": outcomes.documents[place]["doc"],
            "stratum": int(outcomes.stratum[place]),
            "task": outcomes.documents[place]["task"] or "",
            "answers": list(outcomes.documents[place]["answers"] or ()),
            "prompt": outcomes.documents[place]["prompt_tokens"],
        }
        for place in np.unique(outcomes.doc[rows]).tolist()
    ]


def _trajectories(outcomes: Outcomes, rows: Ints, streams: Streams, reference: list[int]) -> dict[str, list[Any]]:
    """Return the columns of the sample's trajectories by name; None for the position of an absent mismatch or EOS."""
    places = np.unique(outcomes.doc[rows])
    columns: dict[str, list[Any]] = {
        "document": np.searchsorted(places, outcomes.doc[rows]).tolist(),
        "action": outcomes.action[rows].tolist(),
        "replicate": outcomes.replicate[rows].tolist(),
        "reference": reference,
        "mismatches": outcomes.mismatches[rows].tolist(),
        "agreement": outcomes.longest_agreement[rows].tolist(),
    }
    for name in ("tau", "eos_x", "eos_y"):
        columns[name] = [value or None for value in getattr(outcomes, name)[rows].tolist()]
    unscored = dict.fromkeys(SCORED)
    for name in SCORED:
        columns[name] = [streams.scores.get(at, unscored)[name] for at in range(len(rows))]
    return columns


def _jumps(sample: Sample) -> list[dict[str, Any]]:
    place = {row: at for at, row in enumerate(sample.rows.tolist())}
    return [
        {
            "kind": jump.kind, "stratum": jump.stratum, "action": jump.action, "total": jump.total,
            "to": [place[row] for row in jump.rows],
        }
        for jump in sample.jumps
    ]  # fmt: skip


def _planes(values: NDArray[Any]) -> bytes:
    """Return an array's bytes: the lowest byte of every number, then the second byte of every number, and so on."""
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")


def write_explorer(content: PageContent, folder: Path, token_text: Callable[[int], str] | None) -> Path | None:
    """Write ``trajectories.html`` in ``folder`` and return its path.

    For finite-state systems, whose tokens are no text, nothing is written, and None is returned. Without ``token_text``
    the explorer shows token ids. The same input gives the same bytes.
    """
    if content.facts.finite:
        return None
    outcomes = read_outcomes(content)
    sample = choose(outcomes)
    streams = read_streams(content.source, outcomes, sample.rows)
    facts = content.facts
    names = {
        "study": facts.study, "model": facts.model, "split": content.split, "store": content.provenance.store,
        "other": facts.other,
    }  # fmt: skip
    script = "".join((_TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    html = rendered(
        "explorer/explorer",
        **names,
        packed=pack(outcomes, sample, streams, token_text, names, read_prompts(content.source, outcomes, sample)),
        sampling=facts.other_sampling,
        engine=facts.engine,
        own_weights=facts.own_weights,
        script=script,
        # The browser runs only this script, whatever a token's text may contain.
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        style=(_TEMPLATES / "explorer.css").read_text(encoding="utf-8"),
    )
    path = folder / EXPLORER
    path.write_text(html, encoding="utf-8", newline="\n")
    return path
