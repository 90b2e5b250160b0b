"""Write a store of any size whose events follow a known distribution, and derive it like the store of a real study.

The distribution of a document's events under an action follows from its rates (`Rates`). The distance at a position is
its rate times a factor that is uniform on [1/2, 3/2]. The distance is exactly the probability of a mismatch, as in the
coupling:

    t = 1                            delta = f = 0: eviction follows prefill
    until tau                        delta = f around ``entry``: one history, so that tau is geometric
    after tau, last step agreed      delta around ``after_agreement``, f around ``entry``
    after tau, last step mismatched  delta around ``after_mismatch``, and exactly 1 with probability ``saturated``
    either side emits a token        it is EOS with probability ``eos``; a mismatch is never EOS on both sides
    one side past its EOS            delta = 1 - ``eos``: the other side agrees only by ending too
    X past its EOS                   f = 0
    both past EOS                    delta = 0
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvdrift.log.store import Store, Unit
from kvdrift.schema.keyed_random import keyed_generator
from kvdrift.schema.tables import ACTIONS, DOCUMENTS, EVENTS, STUDIES
from kvdrift.schema.windows import Windows
from kvdrift.transforms.pipeline import run_derivation

STUDY, MODEL = "synthetic", "synthetic/chain"
EOS_TOKEN = 0
VOCABULARY = 32_000
DOCUMENTS_AT_ONCE = 16  # drawn and committed together

_Float = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a study, with ``documents`` per stratum; the defaults are the paper's."""

    strata: int = 6
    documents: int = 48
    actions: int = 3
    replicates: int = 64
    horizon: int = 128

    @property
    def events(self) -> int:
        """The number of events."""
        return self.strata * self.documents * self.actions * self.replicates * self.horizon

    @property
    def action_names(self) -> list[str]:
        """The names of the actions, from the mildest to the harshest."""
        return [f"keep-{number}" for number in range(self.actions, 0, -1)]


ONE_DOCUMENT = Sizes(strata=1, documents=1, actions=3, replicates=2, horizon=8)
"""The sizes of stores of many small units, whose documents are added one after another."""


@dataclass(frozen=True)
class Rates:
    """The probabilities from which events are drawn, as the module's docstring says; each [documents, actions]."""

    entry: _Float
    after_agreement: _Float
    after_mismatch: _Float
    saturated: _Float
    eos: _Float


@dataclass(frozen=True)
class Paths:
    """Coupled pairs, each array [..., H]: tokens int32, distances float32, flags bool."""

    x_token: NDArray[np.int32]
    y_token: NDArray[np.int32]
    delta: NDArray[np.float32]
    f: NDArray[np.float32]
    x_eos: NDArray[np.bool_]
    y_eos: NDArray[np.bool_]


def write_study(
    location: str, sizes: Sizes, seed: int = 0, *, derived: bool = True, actions: Sequence[str] | None = None
) -> Store:
    """Write the study's tables into a new or partial store and derive it; equal sizes and seed give equal events.

    With ``actions``, only the events of these actions are written.
    """
    names = sizes.action_names if actions is None else actions
    documents = document_rows(sizes)
    store = new_study(location, sizes, seed, documents)
    for first in range(0, len(documents), DOCUMENTS_AT_ONCE):
        units = drawn_units(documents[first : first + DOCUMENTS_AT_ONCE], sizes, seed)
        store.append_units([unit for unit in units if unit.record["action"] in names])
    if derived:
        run_derivation(store.location)
    return store


def new_study(location: str, sizes: Sizes, seed: int, documents: list[dict[str, Any]]) -> Store:
    """Write the rows of a study, its documents and its actions, without units."""
    store = Store.create(location)
    actions = [action_row(name) for name in sizes.action_names]
    for table, rows in ((STUDIES, [study_row(sizes, seed)]), (DOCUMENTS, documents), (ACTIONS, actions)):
        store.append_rows(table.name, pa.Table.from_pylist(rows, schema=table.schema))
    return store


def document_rows(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the rows of ``documents`` of all strata; their prompts are not stored."""
    return [
        document_row(stratum, number) for stratum in range(1, sizes.strata + 1) for number in range(sizes.documents)
    ]


def document_row(stratum: int, number: int) -> dict[str, Any]:
    """Return a row of ``documents``: document ``number`` of a stratum, with a prompt of 1,024 * ``stratum`` tokens."""
    name = f"synthetic-{stratum}-{number:04}"
    return {
        "study": STUDY, "model": MODEL, "doc": name, "split": "evaluation", "stratum": f"SYNTHETIC-{stratum}K",
        "cluster": name, "source": "synthetic", "prompt_tokens": 1024 * stratum,
    }  # fmt: skip


def draw_rates(documents: list[dict[str, Any]], sizes: Sizes, seed: int) -> Rates:
    """Return the rates of each document and action: with harsher actions and longer prompts, pairs diverge earlier."""
    harshness = np.linspace(0.5, 2.0, sizes.actions)
    uniform = np.array([_generator(seed, row["doc"], "rates").random(5) for row in documents])  # [documents, 5]
    length = np.array([row["prompt_tokens"] / 1024 for row in documents])
    entry = (0.01 + 0.05 * uniform[:, 0]) * (1 + 0.1 * length)
    after_agreement = 0.2 + 0.4 * uniform[:, 1]
    after_mismatch = 0.5 + 0.3 * uniform[:, 2]
    saturated = 0.3 * uniform[:, 3]
    eos = 0.002 + 0.01 * uniform[:, 4]
    each = np.ones(sizes.actions)
    return Rates(
        entry[:, None] * harshness, after_agreement[:, None] * np.sqrt(harshness) / np.sqrt(2.0),
        after_mismatch[:, None] * each, saturated[:, None] * each, eos[:, None] * each,
    )  # fmt: skip


def draw_uniforms(documents: list[dict[str, Any]], sizes: Sizes, seed: int) -> _Float:
    """Return the uniforms from which pairs are drawn: [documents, actions, K, H, 4] on [0, 1)."""
    shape = (sizes.actions, sizes.replicates, sizes.horizon, 4)
    return np.stack([_generator(seed, row["doc"], "paths").random(shape) for row in documents])


def draw_paths(rates: Rates, uniform: _Float) -> Paths:
    """Return coupled pairs, arrays [documents, actions, K, H], from rates and uniforms.

    ``uniform`` is [documents, actions, K, H, 4]; its last axis decides mismatch, size of the distance, EOS, and token.
    """
    shape = uniform.shape[:-1]
    horizon = shape[-1]
    entry, after_agreement, after_mismatch, saturated, eos = (
        getattr(rates, name)[:, :, None] for name in ("entry", "after_agreement", "after_mismatch", "saturated", "eos")
    )
    x_token, y_token = np.empty(shape, np.int32), np.empty(shape, np.int32)
    delta, f = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    x_eos, y_eos = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
    diverged, mismatched, x_over, y_over = (np.zeros(shape[:-1], np.bool_) for _ in range(4))
    for t in range(horizon):
        mismatch_u, size_u, eos_u, token_u = (uniform[..., t, i] for i in range(4))
        size = 0.5 + size_u
        if t:
            forced = np.minimum(entry * size, 1.0)
            # A step is saturated if the uniform of its size is below ``saturated``.
            again = np.where(size_u < saturated, 1.0, np.minimum(after_mismatch * size, 1.0))
            inside = np.where(mismatched, again, np.minimum(after_agreement * size, 1.0))
            distance = np.where(diverged, inside, forced)
            distance = np.where(x_over & y_over, 0.0, np.where(x_over | y_over, 1.0 - eos, distance))
            delta[..., t] = distance
            f[..., t] = np.where(x_over, 0.0, forced)
        mismatched = mismatch_u < delta[..., t]
        diverged |= mismatched
        token = (1 + token_u * (VOCABULARY - 2)).astype(np.int32)  # 1..VOCABULARY - 2, so that token + 1 exists
        ends = eos_u < eos
        # An agreement with a side past its EOS is an EOS. A mismatch that ends a text ends X or Y, each in half of the
        # cases.
        x_ends = x_over | (~mismatched & y_over) | (ends & ~y_over & (~mismatched | (eos_u < eos / 2)))
        y_ends = y_over | (~mismatched & x_over) | (ends & ~x_over & (~mismatched | (eos_u >= eos / 2)))
        x_over, y_over = x_ends, y_ends
        x_token[..., t] = np.where(x_over, EOS_TOKEN, token)
        y_token[..., t] = np.where(y_over, EOS_TOKEN, token + mismatched)
        x_eos[..., t], y_eos[..., t] = x_over, y_over
    return Paths(x_token, y_token, delta, f, x_eos, y_eos)


def drawn_units(documents: list[dict[str, Any]], sizes: Sizes, seed: int) -> Iterator[Unit]:
    """Yield the units of documents under all actions; the seed decides their events."""
    paths = draw_paths(draw_rates(documents, sizes, seed), draw_uniforms(documents, sizes, seed))
    for i, row in enumerate(documents):
        for j, action in enumerate(sizes.action_names):
            names = {"study": STUDY, "model": MODEL, "doc": row["doc"], "action": action}
            record: dict[str, Any] = {
                **names, "first_replicate": 0, "replicates": sizes.replicates, "horizon": sizes.horizon, "seed": seed,
            }  # fmt: skip
            columns = {field: getattr(paths, field)[i, j].ravel() for field in Paths.__dataclass_fields__}
            yield Unit(record, _events(names, sizes, columns))


def _events(names: dict[str, str], sizes: Sizes, columns: dict[str, NDArray[Any]]) -> pa.Table:
    rows = sizes.replicates * sizes.horizon
    positions = {
        "replicate": np.repeat(np.arange(sizes.replicates, dtype=np.int32), sizes.horizon),
        "t": np.tile(np.arange(1, sizes.horizon + 1, dtype=np.int32), sizes.replicates),
    }
    arrays = {name: pa.repeat(pa.scalar(value), rows) for name, value in names.items()}
    arrays |= {name: pa.array(value) for name, value in (positions | columns).items()}
    return pa.table(arrays, schema=pa.schema([EVENTS.schema.field(name) for name in arrays]))


def _generator(seed: int, *place: str) -> np.random.Generator:
    return keyed_generator(json.dumps([seed, *place]))


def study_row(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Return the row of ``studies``."""
    deciding = json.dumps([asdict(sizes), seed]).encode()
    return {
        **STUDIES.defaults, "study": STUDY, "model": MODEL, "seed": seed, **asdict(Windows.of(sizes.horizon)),
        "study_sha256": hashlib.sha256(deciding).hexdigest(),
    }  # fmt: skip


def action_row(name: str) -> dict[str, Any]:
    """Return a row of ``actions``."""
    return {
        "study": STUDY, "action": name, "selector": "synthetic", "keep": name.removeprefix("keep-"),
        "position_mode": "none: synthetic", "control": False, "prespecified": True,
        "action_revision": 0, "dropped": False,
    }  # fmt: skip
