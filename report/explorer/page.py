"""The trajectory explorer: a file that opens from ``file://`` and holds everything that it shows.

It has a manifest in JSON and arrays of numbers, each as gzip in base64. The arrays, one after the other, with n
trajectories of H positions and s different streams of X:

    x      token index [s, H]     indices into the manifest's ``tokens``
    y      token index [n, H]
    delta  float32     [n, H]
    f      float32     [n, H]     the bits of f xor those of delta: 0 while the histories are equal

A token index has 2 bytes, or 4 if there are more than 65,536 different tokens. The bytes of an array are grouped by
their place in the number, the lowest first, since such arrays compress better. ``packed.js`` reads both texts.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.report.explorer.prompts import Prompt, pack_prompts, read_prompts
from kvdrift.report.explorer.sample import Sample, choose
from kvdrift.report.explorer.trajectories import SCORED, Ints, Outcomes, Streams, read_outcomes, read_streams
from kvdrift.report.printing.html import rendered
from kvdrift.report.reading.content import PageContent

EXPLORER = "trajectories.html"
_TEMPLATES = Path(__file__).parents[1] / "templates" / "explorer"
_SCRIPTS = ("words", "packed", "overview", "score", "prompt", "explorer")
"""One after the other they are the page's script."""


@dataclass(frozen=True)
class Packed:
    """The two texts of the page, in base64."""

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

    Without ``token_text`` the page shows numbers. ``names`` are further entries of the manifest about the study, and
    the prompts are packed in their order while there is room.
    """
    drawn = np.stack([streams.x, streams.y])
    tokens = np.unique(np.concatenate([drawn.ravel(), *(prompt.tokens for prompt in prompts)]))
    x, y = np.searchsorted(tokens, drawn)
    first, reference = _references(outcomes, sample.rows, x)
    kind = np.dtype("<u2" if len(tokens) <= 1 << 16 else "<u4")
    delta, f = (values.astype("<f4").view("<u4") for values in (streams.delta, streams.f))
    places = np.unique(outcomes.doc[sample.rows]).tolist()
    said, prompt_texts = pack_prompts([*prompts], tokens)
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
        "prompts": [{"document": places.index(one.pop("place"))} | one for one in said],
    }
    # Tokens may be halves of characters; JSON escapes carry them.
    held = json.dumps(manifest, separators=(",", ":")).encode("ascii")
    return Packed(_text(held), _text(arrays), tuple(prompt_texts))


def _references(outcomes: Outcomes, rows: Ints, x: Ints) -> tuple[list[int], list[int]]:
    """Find the distinct streams of X: a trajectory with each stream, and the number of each trajectory's stream.

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
    """Return the documents of the sample, each with its index among all documents."""
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
    """Return the sample's trajectories by column; null is a position that does not exist."""
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
    """Return the jumps, with indices into the sample."""
    place = {row: at for at, row in enumerate(sample.rows.tolist())}
    return [
        {
            "kind": jump.kind, "stratum": jump.stratum, "action": jump.action, "total": jump.total,
            "to": [place[row] for row in jump.rows],
        }
        for jump in sample.jumps
    ]  # fmt: skip


def _planes(values: NDArray[Any]) -> bytes:
    """Return an array's bytes: the lowest of every number, then the next ones."""
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")


def write_explorer(content: PageContent, folder: Path, token_text: Callable[[int], str] | None) -> Path | None:
    """Write ``trajectories.html`` under ``folder``; None for finite-state systems, whose tokens are no text.

    Without ``token_text`` the explorer shows numbers. The same input gives the same bytes.
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
        law=facts.other_law,
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
