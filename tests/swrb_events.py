"""Events of residual branching from plain loops: scans and branches of laws that do not look at the history.

Position t has one pair of laws over four tokens, the last of them EOS; a side that has ended keeps a point mass there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schema.store import Unit
from schema.tables import EVENTS, UNITS

Row = dict[str, Any]
Law = npt.NDArray[np.float64]

EOS = 3


@dataclass(frozen=True)
class Laws:
    """``p[t - 1]`` and ``q[t - 1]`` are the laws of position t while neither side has ended."""

    p: list[Law]
    q: list[Law]

    @property
    def horizon(self) -> int:
        """H."""
        return len(self.p)

    def at(self, t: int, *, x_ended: bool, y_ended: bool) -> tuple[Law, Law]:
        """Both laws at t."""
        end = np.eye(EOS + 1)[EOS]
        return end if x_ended else self.p[t - 1], end if y_ended else self.q[t - 1]


def random_laws(chance: np.random.Generator, horizon: int, *, apart: float = 0.3, apart_at: int = 0) -> Laws:
    """Laws of total variation up to ``apart`` at each position, equal at every third; disjoint at ``apart_at``."""
    p = [chance.dirichlet([2.0, 2.0, 2.0, 0.3]) for _ in range(horizon)]
    q = [
        (1 - mixed) * law + mixed * chance.dirichlet([2.0, 2.0, 2.0, 0.3])
        for law, mixed in zip(p, apart * chance.random(horizon) * (chance.random(horizon) > 1 / 3), strict=True)
    ]
    if apart_at:
        p[apart_at - 1], q[apart_at - 1] = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.0, 0.0, 0.75, 0.25])
    return Laws(p, q)


def plain_replicate(names: Row, laws: Laws, chance: np.random.Generator) -> list[Row]:
    """One coupled pair from position 1 on."""
    return coupled_steps({**names, "kind": "coupled"}, laws, 1, chance)


def swrb_replicate(names: Row, laws: Laws, chance: np.random.Generator) -> list[Row]:
    """One overlap scan and, unless M = 0, one residual branch, as algorithm "conditional-measurement" says."""
    rows, survival, ended, history = [], 1.0, False, [False]
    for t in range(1, laws.horizon + 1):
        p, q = laws.at(t, x_ended=ended, y_ended=ended)
        common = np.minimum(p, q)
        deficit = 0.5 * float(np.abs(p - q).sum())
        weight, survival = survival * deficit, survival * (1 - deficit)
        token = draw(common, chance) if survival > 0 else -1
        ended = ended or token == EOS
        history.append(ended)
        both = {"x_token": token, "y_token": token, "x_eos": ended, "y_eos": ended}
        rows.append(event(names, "scan", t, deficit, deficit, both, weight))
        if survival == 0:
            break
    weights = [row["weight"] for row in rows]
    mass = sum(weights)
    if mass == 0:
        return rows
    start = 1 + int(chance.choice(len(weights), p=np.array(weights) / mass))
    return rows + coupled_steps(
        {**names, "kind": "branch"}, laws, start, chance, ended=history[start - 1], residual=True
    )


def coupled_steps(
    names: Row, laws: Laws, start: int, chance: np.random.Generator, *, ended: bool = False, residual: bool = False
) -> list[Row]:
    """The coupling from ``start`` to H; with ``residual`` its first pair is drawn from both residuals."""
    rows, x_ended, y_ended = [], ended, ended
    for t in range(start, laws.horizon + 1):
        p, q = laws.at(t, x_ended=x_ended, y_ended=y_ended)
        _, forced = laws.at(t, x_ended=x_ended, y_ended=x_ended)
        common = np.minimum(p, q)
        if (residual and t == start) or chance.random() >= common.sum():
            x, y = draw(p - common, chance), draw(q - common, chance)
        else:
            x = y = draw(common, chance)
        x_ended, y_ended = x_ended or x == EOS, y_ended or y == EOS
        delta, f = (0.5 * float(np.abs(p - other).sum()) for other in (q, forced))
        tokens = {"x_token": x, "y_token": y, "x_eos": x_ended, "y_eos": y_ended}
        rows.append(event(names, names["kind"], t, delta, f, tokens, None))
    return rows


def event(names: Row, kind: str, t: int, delta: float, f: float, tokens: Row, weight: float | None) -> Row:
    """One row of events; distances as float32, the stored type."""
    single = {"delta": as_float32(delta), "f": as_float32(f)}
    return {**names, "kind": kind, "t": t, **tokens, **single, "weight": weight}


def draw(weights: Law, chance: np.random.Generator) -> int:
    """One token, with probability proportional to its weight."""
    return int(chance.choice(len(weights), p=weights / weights.sum()))


def as_float32(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def table(rows: list[Row]) -> pa.Table:
    """Rows of events as a table of the declared schema."""
    return pa.Table.from_pylist(rows, schema=EVENTS.schema)


def unit(rows: list[Row], estimator: str, horizon: int, **measured: Any) -> Unit:
    """The unit of one document's, action's and estimator's replicates, from 0 on; ``measured`` are other fields."""
    record: Row = dict.fromkeys(column for column in UNITS.columns if column != "path")
    record |= {name: rows[0][name] for name in ("study", "model", "doc", "action")}
    replicates = 1 + max(row["replicate"] for row in rows)
    record |= {"estimator": estimator, "first_replicate": 0, "replicates": replicates, "horizon": horizon}
    return Unit(record | measured, table(rows))
