"""Finite-state systems whose every view can be checked by enumeration, and a store of their rollouts.

Fifty random systems in 18 studies, one for each (alphabet, horizon, with or without EOS), and seven systems made for a
corner of residual branching, each a study of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from fixtures.stored_units import derive
from numpy.typing import NDArray

from kvdrift.generator.actions import Action
from kvdrift.generator.finite.model import FiniteModel
from kvdrift.generator.finite.study_systems import exact_value_rows, system_document
from kvdrift.generator.finite.system import FiniteSystem
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.unit import DERIVED_TABLES
from kvdrift.schema.estimate_tables import EXACT_VALUES
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import FINITE_STATE, POOLED
from kvdrift.schema.tables import DOCUMENTS, PLAIN, STUDIES, SWRB
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import open_views

SYSTEMS, REPLICATES, SEED, MODEL = 50, 2000, 4, "exact"
# An action mixes the reference with a law of its own, by so much.
ACTIONS = {"baseline": 0.15, "close": 0.3, "far": 0.6}
SPECIAL_ACTION = "action"
EOS_TOKENS = {2: (1,), 3: (2,), 4: (3, 1)}

Laws = list[NDArray[np.float64]]
Row = dict[str, Any]


# Windows that are as little empty as the horizon allows; block 2 of H = 2, and all but block 3 of H = 1, have to be.
WINDOWS = {
    1: Windows(1, 0, 0, 1, 0, 0, 1, 0.1),
    2: Windows(2, 1, 1, 1, 1, 1, 1, 0.1),
    3: Windows(3, 1, 1, 1, 1, 2, 1, 0.1),
    4: Windows(4, 2, 1, 2, 1, 2, 2, 0.1),
}


@dataclass(frozen=True, eq=False)
class ExactStudy:
    """Systems of one horizon and EOS, by stratum."""

    name: str
    strata: dict[str, list[FiniteSystem]]

    @property
    def systems(self) -> list[FiniteSystem]:
        """Return the systems of all strata."""
        return [system for systems in self.strata.values() for system in systems]

    @property
    def weights(self) -> dict[str, dict[str, float]]:
        """Return the weights of each stratum's systems, and of all systems pooled: w_d = 1 / (S n_stratum(d))."""
        found = {}
        for stratum in (*self.strata, POOLED):
            own = self.strata if stratum == POOLED else {stratum: self.strata[stratum]}
            found[stratum] = {s.name: 1 / (len(own) * len(systems)) for systems in own.values() for s in systems}
        return found

    @property
    def windows(self) -> Windows:
        """Return the windows for the systems' horizon."""
        return WINDOWS[self.systems[0].horizon]

    @property
    def actions(self) -> list[str]:
        """Return the actions, which are the same in all systems."""
        return list(self.systems[0].actions)


@cache
def random_studies() -> tuple[ExactStudy, ...]:
    """Make the fifty random systems: two or three in each study, in two strata, of which one may have two systems."""
    shapes = list(product((2, 3, 4), (2, 3, 4), (False, True)))
    strata: list[dict[str, list[FiniteSystem]]] = [{"x": [], "y": []} for _ in shapes]
    for number in range(SYSTEMS):
        alphabet, horizon, ends = shapes[number % len(shapes)]
        eos = EOS_TOKENS[alphabet] if ends else ()
        stratum = "y" if number // len(shapes) == 1 else "x"
        strata[number % len(shapes)][stratum].append(_random_system(number, alphabet, horizon, eos))
    names = [f"{alphabet}-{horizon}-{'eos' if ends else 'open'}" for alphabet, horizon, ends in shapes]
    return tuple(ExactStudy(name, systems) for name, systems in zip(names, strata, strict=True))


def _random_system(number: int, alphabet: int, horizon: int, eos: tuple[int, ...]) -> FiniteSystem:
    """Return one random system; every third has tokens of probability 0, different ones on the two sides."""
    chance = np.random.default_rng([SEED, number])

    def laws() -> Laws:
        tables = []
        for t in range(horizon):
            weights = chance.gamma(1.5, size=(alphabet**t, alphabet)) + 0.05
            if number % 3 == 2:
                weights *= chance.random(weights.shape) < 0.8
                weights[:, 0] += weights.sum(axis=1) == 0.0  # never without mass
            tables.append(weights / weights.sum(axis=1, keepdims=True))
        return tables

    reference = laws()
    mixed = {
        name: tuple((1.0 - share) * p + share * own for p, own in zip(reference, laws(), strict=True))
        for name, share in ACTIONS.items()
    }
    return FiniteSystem(f"system-{number}", alphabet, horizon, tuple(reference), mixed, eos)


@cache
def special_studies() -> tuple[ExactStudy, ...]:
    """Make the seven special systems, each with one action."""
    chance = np.random.default_rng(SEED)

    def laws(alphabet: int, horizon: int) -> Laws:
        return [chance.dirichlet(np.ones(alphabet), alphabet**t) for t in range(horizon)]

    def disjoint(t: int, rows: slice) -> tuple[Laws, Laws]:
        """Make laws over 4 tokens to H = 3 that have no token in common after the histories ``rows`` of t tokens."""
        p, q = laws(4, 3), laws(4, 3)
        p[t][rows], q[t][rows] = [0.25, 0.75, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]
        return p, q

    def study(name: str, p: Laws, q: Laws, eos: tuple[int, ...] = ()) -> ExactStudy:
        system = FiniteSystem(name, p[0].shape[1], len(p), tuple(p), {SPECIAL_ACTION: tuple(q)}, eos)
        return ExactStudy(name, {"x": [system]})

    equal, before, ending = laws(3, 3), laws(3, 3), laws(3, 4)
    for law in ending:
        law[:] = 0.5 * law + 0.5 * np.array([0.0, 0.0, 1.0])
    return (  # M is the mass of a scan, J where its branch starts
        study("no-mass", equal, equal, (2,)),  # M = 0
        study("disjoint-first", *disjoint(0, slice(None))),  # M = 1, J = 1, and survival is 0 at once
        study("disjoint-later", *disjoint(1, slice(None))),  # M = 1, J = 1 or 2
        study("last-only", before, [*before[:2], *laws(3, 3)[2:]]),  # J = H
        study("sometimes-disjoint", *disjoint(1, slice(0, 1))),  # survival reaches 0 on some scans
        # Scans that end early, in EOS, with and without mass.
        study("eos-inside", ending, [0.7 * p + 0.3 * a for p, a in zip(ending, laws(3, 4), strict=True)], (2,)),
        study("horizon-1", laws(3, 1), laws(3, 1)),
    )


MOMENT_VIEWS = ("moments", "position_moments", "lag_moments", "depth_moments", "stratum_moments")
SWRB_VIEWS = ("swrb", "swrb_windows")


_measured: dict[str, list[Row]] = {}


def measured(view: str) -> list[Row]:
    """Return the rows of a view that the fixture ``exact_systems`` has read."""
    return _measured[view]


def read_measured(folder: Path) -> None:
    """Read what ``write_measured`` has written into this folder, for ``measured``."""
    if not _measured:
        _measured.update(pickle.loads((folder / "measured").read_bytes()))  # noqa: S301 - this test run wrote it


def write_measured(folder: Path) -> None:
    """Roll every system out by both estimators, derive, and read the views; the same numbers in every run."""
    studies = (*random_studies(), *special_studies())
    with TemporaryDirectory() as place:
        store = Store.create(Path(place) / "store")
        _append_rows(store, studies)
        store.append_units([unit for study in studies for unit in _rolled_out(study)])
        derive(store, DERIVED_TABLES)
        with open_views(store, kept=("moments", "profiles", "swrb")) as opened:  # others are computed from these
            rows = {view: opened.rows(view).to_pylist() for view in (*MOMENT_VIEWS, *SWRB_VIEWS)}
    (folder / "measured").write_bytes(pickle.dumps(rows))


def _rolled_out(study: ExactStudy) -> Iterator[Unit]:
    model = FiniteModel(MODEL, {system.name: system for system in study.systems})
    pending_units = [
        PendingUnit(Action(name, FINITE_STATE, Full(), Retention(None)), 0, REPLICATES, estimator)
        for name in study.actions
        for estimator in (PLAIN, SWRB)
    ]
    for stratum, systems in study.strata.items():
        for system in systems:
            document = system_document(system, stratum)
            yield from generate_units(model, study.name, document, pending_units, system.horizon, SEED)


def _append_rows(store: Store, studies: Iterable[ExactStudy]) -> None:
    """Append the rows of the studies besides events: the studies, their documents and the exact values."""
    parameters, documents, exact = [], [], []
    for study in studies:
        named = {"study": study.name, "model": MODEL}
        parameters.append({**named, **vars(study.windows), "seed": SEED, "study_sha256": "0" * 64, "temperature": 1.0})
        for stratum, systems in study.strata.items():
            for system in systems:
                doc = system_document(system, stratum).doc
                documents.append(
                    {
                        **named, "doc": doc, "split": "evaluation", "stratum": stratum, "cluster": doc,
                        "source": FINITE_STATE, "prompt_tokens": 0, "answers": [],
                    }
                )  # fmt: skip
                exact += exact_value_rows(study.name, MODEL, system)
    for table, rows in ((STUDIES, parameters), (DOCUMENTS, documents), (EXACT_VALUES, exact)):
        store.append_rows(table.name, pa.Table.from_pylist(rows, schema=table.schema))
