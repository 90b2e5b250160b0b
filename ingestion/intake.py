"""Compare correct units with a store, queue the new replicates, and commit many units together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestion.documents import DocumentRows
from ingestion.event_rows import VALUES, EventRows
from ingestion.facts import FactRows
from ingestion.records import Record
from log.store import Store, Unit
from log.units.revisions import current_documents, newest_plans, newest_revisions
from schema.rows import Ints
from schema.study import CONTROL_ACTION, FLOOR_ACTION, KERNEL_FLOOR_ACTION, NUMERICS
from schema.tables import ACTIONS, DOCUMENTS, GROUP_KEY, PLAIN

_UNITS_PER_COMMIT = 256
_EVENTS_PER_COMMIT = 1 << 20

UnitGroup = tuple[str, str, str, str]  # study, model, doc, action


@dataclass(frozen=True)
class Refusal:
    """The reason why a unit without an error of its own cannot go into the store, and its offending rows.

    ``at`` is the first of them in the unit, from 0; None if the reason concerns no single row.
    """

    kind: str
    text: str
    at: int | None = None
    count: int = 1


class _Held(NamedTuple):
    """Replicates ``first`` to ``end`` - 1 of a group, stored or queued; ``unit`` is None while they are queued."""

    first: int
    end: int
    horizon: int
    unit: int | None


class Intake:
    """A store that takes in units, many in one commit."""

    def __init__(
        self, store: Store, documents: DocumentRows, horizon: int | None = None, facts: FactRows | None = None
    ) -> None:
        """Read the store's units, documents, actions and plans.

        ``horizon`` is H for each study and model of which the store has no H.
        """
        self._store, self._given, self._facts = store, documents, facts or FactRows()
        self._declared = {
            (row["study"], row["model"]): int(row["horizon"]) for row in store.read("studies").to_pylist()
        }
        self._horizons: dict[tuple[str, str], int] = {}
        self._horizon = horizon
        self._held: dict[UnitGroup, list[_Held]] = {}
        self._load_units()
        rows = current_documents(store.read("documents")).to_pylist()
        self._documents = {(row["study"], row["model"], row["doc"]): row for row in rows}
        self._splits = {(row["study"], row["model"], row["cluster"]): row["split"] for row in rows}
        actions = store.read("actions")
        self._controls = {(row["study"], row["action"]): row["control"] for row in actions.to_pylist()}
        self._revisions = newest_revisions(actions)
        self._generated = {  # actions that kvdrift generated itself
            (row["study"], row["model"], row["action"]) for row in store.read("identities").to_pylist()
        }
        self._planned: dict[str, set[str]] = defaultdict(set)  # actions that the newest plans of a study name
        plans = store.read("plans", columns=["study", "model", "plan", "plan_revision"])
        for (study, _), row in newest_plans(plans).items():
            self._planned[study].update(json.loads(row["plan"]).get("actions", ()))
        self._units: list[Unit] = []
        self._events = 0
        self._new_documents: list[dict[str, Any]] = []
        self._new_actions: list[dict[str, Any]] = []

    def _load_units(self) -> None:
        self._held.clear()
        self._stored_events = self._store.rows_of_units("events")
        for row in self._store.units().to_pylist():
            pair = row["study"], row["model"]
            self._horizons[pair] = max(self._horizons.get(pair, 0), row["horizon"])
            if row["estimator"] != PLAIN:  # a log has plain replicates only, so an SWRB unit cannot overlap them
                continue
            first = row["first_replicate"]
            held = _Held(first, first + row["replicates"], row["horizon"], row["unit"])
            self._held.setdefault((row["study"], row["model"], row["doc"], row["action"]), []).append(held)

    def horizon(self, study: str, model: str) -> int | None:
        """Return H of a study and model; None if neither the store nor the call gave H."""
        pair = study, model
        return self._declared.get(pair, self._horizons.get(pair, self._horizon))

    def is_control(self, study: str, action: str) -> bool:
        """Tell whether an action is the full-retention control."""
        return bool(self._controls.get((study, action), action == CONTROL_ACTION))

    def has(self, key: UnitGroup, replicate: int) -> bool:
        """Tell whether a replicate is stored or queued."""
        return bool(self._overlapping(key, replicate, replicate + 1))

    def stored(self, key: UnitGroup, replicates: Ints) -> Iterator[pa.Table]:
        """Yield the stored events of some replicates of a group, in the columns ``VALUES``."""
        wanted = pa.array(np.unique(replicates))
        first, end = int(replicates.min()), int(replicates.max()) + 1
        for held in self._stored_overlapping(key, first, end):
            rows = self._rows_of(held, key)
            yield rows.filter(pc.is_in(rows["replicate"], value_set=wanted))

    def offer(self, key: UnitGroup, rows: EventRows, horizon: int) -> int | Refusal:
        """Queue those replicates of a unit that the store lacks; the rows are whole replicates in key order.

        Returns the number of new replicates, or the reason why the unit cannot go in, such as other content in the
        store.
        """
        if revision := self._revisions.get((key[0], key[3]), 0):
            superseded = f"action '{key[3]}' was redone or dropped, and revision {revision} supersedes events of a file"
            return Refusal("revision", f"{superseded}; give the events another action name")
        document = self._document_row(key)
        if isinstance(document, Refusal):
            return document
        first = int(rows.replicate[0])
        end = first + len(rows) // horizon
        new = np.ones(end - first, dtype=np.bool_)
        for held in self._stored_overlapping(key, first, end):
            low, high = max(first, held.first), min(end, held.end)
            own = slice((low - first) * horizon, (high - first) * horizon)
            conflict = self._conflict(key, rows.take(own), own.start, held, low, horizon)
            if conflict is not None:
                return conflict
            new[low - first : high - first] = False
        if new.any() and (key[0], key[1], key[3]) in self._generated:
            made = f"kvdrift generated action '{key[3]}', and a file does not say how its events were made"
            return Refusal("identity", f"{made}; give the events another action name")
        self._horizons.setdefault(key[:2], horizon)
        self._note(key, document)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], new.astype(np.int8), [0])))).tolist()
        for begin, stop in zip(edges[::2], edges[1::2], strict=True):
            self._queue(key, rows.take(slice(begin * horizon, stop * horizon)), first + begin, stop - begin, horizon)
        return int(new.sum())

    def flush(self) -> None:
        """Commit the queued rows: documents and actions first, since no view shows an event without them."""
        for table, rows in ((DOCUMENTS, self._new_documents), (ACTIONS, self._new_actions)):
            if rows:
                self._store.append_rows(table.name, pa.Table.from_pylist(rows, schema=table.schema))
                rows.clear()
        if self._units:
            self._store.append_units(self._units)
        self._units, self._events = [], 0

    def _overlapping(self, key: UnitGroup, first: int, end: int) -> list[_Held]:
        return [held for held in self._held.get(key, ()) if held.first < end and first < held.end]

    def _stored_overlapping(self, key: UnitGroup, first: int, end: int) -> list[_Held]:
        """Return the overlapping units, which are committed before if they are queued."""
        if any(held.unit is None for held in self._overlapping(key, first, end)):
            self.flush()
            self._load_units()
        return self._overlapping(key, first, end)

    def _queue(self, key: UnitGroup, rows: EventRows, first: int, count: int, horizon: int) -> None:
        columns = [pa.repeat(pa.scalar(name), len(rows)) for name in key]
        columns += [pa.array(getattr(rows, name)) for name in VALUES]
        named = dict(zip(GROUP_KEY, key, strict=True))
        record = named | {"first_replicate": first, "replicates": count, "horizon": horizon}
        record |= self._facts.of_unit(named)
        self._units.append(Unit(record, pa.Table.from_arrays(columns, names=[*GROUP_KEY, *VALUES])))
        self._held.setdefault(key, []).append(_Held(first, first + count, horizon, None))
        self._events += len(rows)
        if len(self._units) >= _UNITS_PER_COMMIT or self._events >= _EVENTS_PER_COMMIT:
            self.flush()

    def _rows_of(self, held: _Held, key: UnitGroup) -> pa.Table:
        """Read the events of a stored unit of a group."""
        count = (held.end - held.first) * held.horizon
        (rows,) = self._stored_events.read_each([held.unit or 0], [key[2]], VALUES, count)
        return rows

    def _conflict(
        self, key: UnitGroup, rows: EventRows, at: int, held: _Held, low: int, horizon: int
    ) -> Refusal | None:
        """Return how ``rows``, replicates from ``low`` on, differ from a stored unit; None if they are equal."""
        if held.horizon != horizon:
            return Refusal(
                "conflict", f"the replicate has horizon {horizon}, but the store has it with horizon {held.horizon}", at
            )
        stored = self._rows_of(held, key).slice((low - held.first) * horizon, len(rows))
        differ = {name: getattr(rows, name) != stored.column(name).to_numpy() for name in VALUES}
        wrong = np.flatnonzero(np.any(list(differ.values()), axis=0))
        if not wrong.size:
            return None
        row = int(wrong[0])
        name = next(name for name in VALUES if differ[name][row])
        here, there = getattr(rows, name)[row].item(), stored.column(name)[row].as_py()
        return Refusal("conflict", f"{name} is {here!r}, but the store has {there!r}", at + row, len(wrong))

    def _document_row(self, key: UnitGroup) -> dict[str, Any] | Refusal:
        """Return the ``documents`` row of a unit's document: the store's, or a new one from the documents file."""
        study, model, doc, _ = key
        stored = self._documents.get((study, model, doc))
        given = self._given.find(study, model, doc)
        if given is None:
            return stored or Refusal("document", "the document is neither in the store nor in the --documents file")
        if stored is not None:
            return _contradiction(given, stored) or stored
        row = {"cluster": doc, **given.values, "study": study, "model": model}
        other = self._splits.get((study, model, row["cluster"]), row["split"])
        if other != row["split"]:
            split = f"split is '{row['split']}' ({given.where})"
            return Refusal("document", f"{split}, but cluster '{row['cluster']}' is in split '{other}'")
        return {field.name: row.get(field.name) for field in DOCUMENTS.schema}

    def _note(self, key: UnitGroup, document: dict[str, Any]) -> None:
        """Queue rows for a unit's document and action if they have none."""
        study, model, doc, action = key
        if (study, model, doc) not in self._documents:
            self._documents[study, model, doc] = document
            self._splits[study, model, document["cluster"]] = document["split"]
            self._new_documents.append(document)
        if (study, action) not in self._controls:
            control = self.is_control(study, action)
            self._controls[study, action] = control
            selector = NUMERICS if action in {FLOOR_ACTION, KERNEL_FLOOR_ACTION} else "external"
            self._new_actions.append({
                "study": study, "action": action, "selector": selector, "keep": "all" if control else "unknown",
                "position_mode": "unknown", "control": control, "action_revision": 0, "dropped": False,
                "prespecified": control or study not in self._planned or action in self._planned[study],
                **self._facts.of_action(study, model, action),
            })  # fmt: skip


def _contradiction(given: Record, stored: dict[str, Any]) -> Refusal | None:
    for name, value in given.values.items():
        if stored[name] != value:
            return Refusal("document", f"{name} is {value!r} ({given.where}), but the store has {stored[name]!r}")
    return None
