"""Compare correct units with a store, queue the new replicates, and commit many units together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.ingestion.event_rows import VALUES, EventRows
from kvdrift.ingestion.records import DocumentRows, FactRows
from kvdrift.log.forgotten import forgotten_documents
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_documents, newest_plans, newest_revisions
from kvdrift.log.units.rows import RowsOfUnits
from kvdrift.log.units.unit import SPAN, pairs_sha256, unit_number
from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import Ints
from kvdrift.schema.study import CONTROL_ACTION, EXTERNAL, FLOOR_ACTION, KERNEL_FLOOR_ACTION, NUMERICS
from kvdrift.schema.tables import ACTIONS, DOCUMENTS, GROUP_KEY, PLAIN

UNITS_PER_COMMIT = 1 << 14
_EVENTS_PER_COMMIT = 1 << 20
_OF_UNITS: Final = (*SPAN, "horizon", "unit", "events_sha256")

UnitGroup = tuple[str, str, str, str]  # study, model, doc, action


@dataclass(frozen=True)
class Refusal:
    """The reason why the store refuses a unit that has no errors in itself, and the offending rows.

    ``at`` is the first offending row in the unit, from 0; None if the reason concerns no single row.
    """

    kind: str
    text: str
    at: int | None = None
    count: int = 1


Answer = Callable[[int | Refusal], None]
"""Receives the number of a unit's replicates that were new at the commit, or the reason why the unit is not there."""


@dataclass
class _Held:
    """Replicates ``first`` to ``end`` - 1 of a group, stored or queued; ``unit`` is None while they are queued."""

    first: int
    end: int
    horizon: int
    unit: int | None
    sha256: str | None


@dataclass(frozen=True)
class _Offer:
    """Whole replicates of a group in key order, offered to the store."""

    key: UnitGroup
    rows: EventRows
    horizon: int
    answered: Answer

    @property
    def first(self) -> int:
        return int(self.rows.replicate[0])

    @property
    def end(self) -> int:
        return self.first + len(self.rows) // self.horizon

    def values(self, begin: int, end: int) -> dict[str, npt.NDArray[Any]]:
        """Return the events of replicates ``begin`` to ``end`` - 1 by column, without ``GROUP_KEY``."""
        part = slice((begin - self.first) * self.horizon, (end - self.first) * self.horizon)
        return {name: getattr(self.rows, name)[part] for name in VALUES}


class Intake:
    """A store that takes in units, many in one commit.

    An offered unit is compared with the store when it is offered, and again if another writer commits before it. The
    function that was given with the offer is then called with the outcome.
    """

    def __init__(
        self,
        store: Store,
        documents: DocumentRows,
        horizon: int | None = None,
        facts: FactRows | None = None,
        revised: Collection[tuple[str, str]] = (),
    ) -> None:
        """Read the store's units, documents, actions and plans.

        ``horizon`` is H for each study and model of which the store has no H. Units of the actions ``revised``, pairs
        of study and action, begin a new revision of the action, which supersedes its earlier units.
        """
        self._store, self._document_rows, self._facts = store, documents, facts or FactRows()
        self.requested_horizon, self._revised = horizon, frozenset(revised)
        newest = newest_revisions(store.read("actions"))
        self._is_durable = True  # whether all units that the store is known to have are synced
        self._begun = {named: newest.get(named, 0) + 1 for named in self._revised}
        self._superseded: dict[tuple[str, str], list[UnitGroup]] = defaultdict(list)
        for row in store.units(columns=GROUP_KEY).to_pylist() if self._begun else ():
            if (named := (row["study"], row["action"])) in self._begun:
                self._superseded[named].append((row["study"], row["model"], row["doc"], row["action"]))
        self._load()

    def _load(self) -> None:
        """Read what the store has now, and empty the queue."""
        store = self._store
        self._declared = {
            (row["study"], row["model"]): int(row["horizon"]) for row in store.read("studies").to_pylist()
        }
        self._forgotten = forgotten_documents(store.location)
        rows = current_documents(store.read("documents")).to_pylist()
        self._documents = {(row["study"], row["model"], row["doc"]): row for row in rows}
        self._splits = {(row["study"], row["model"], row["cluster"]): row["split"] for row in rows}
        actions = store.read("actions")
        self._revisions = newest_revisions(actions) | self._begun
        self._actions = {(row["study"], row["action"], row["action_revision"]): row for row in actions.to_pylist()}
        self._generated = {  # actions that kvdrift generated itself
            (row["study"], row["model"], row["action"]) for row in store.read("identities").to_pylist()
        }
        self._planned: dict[str, set[str]] = defaultdict(set)  # actions that the newest plans of a study name
        plans = store.read("plans", columns=["study", "model", "plan", "plan_revision"])
        for (study, _), row in newest_plans(plans).items():
            self._planned[study].update(json.loads(row["plan"]).get("actions", ()))
        self._horizons: dict[tuple[str, str], int] = {}
        self._held: dict[UnitGroup, list[_Held]] = {}
        for row in store.units(columns=_OF_UNITS).to_pylist():
            if row["action_revision"] != self._revisions.get((row["study"], row["action"]), 0):
                continue  # its action is being revised
            self._horizons[row["study"], row["model"]] = row["horizon"]
            if row["estimator"] != PLAIN:  # a log has plain replicates only, so an SWRB unit cannot overlap them
                continue
            first = row["first_replicate"]
            held = _Held(first, first + row["replicates"], row["horizon"], row["unit"], row["events_sha256"])
            self._held.setdefault((row["study"], row["model"], row["doc"], row["action"]), []).append(held)
        self._queue: list[tuple[_Offer, list[dict[str, Any]]]] = []  # with the records of units that are new
        self._events = self._units = 0
        self._new_documents: list[dict[str, Any]] = []
        self._new_actions: list[dict[str, Any]] = []
        self._stored_events: RowsOfUnits | None = None

    def revisions(self) -> Iterator[str]:
        """Yield for each revised action a line on the units that its revision supersedes; call it after all commits."""
        for named, groups in sorted(self._superseded.items()):
            what = f"revision {self._begun[named]} supersedes {len(groups)} units"
            line = f"action '{named[1]}' of study '{named[0]}': {what}"
            if lacking := sorted({group[2] for group in groups if group not in self._held}):
                more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
                line += f"; it has no events of document {lacking[0]}{more}, of which the earlier revision has some"
            yield line

    def horizon(self, study: str, model: str) -> int | None:
        """Return H of a study and model; None if neither the store nor the call gave H."""
        pair = study, model
        return self._declared.get(pair, self._horizons.get(pair, self.requested_horizon))

    def horizon_origin(self, study: str, model: str) -> str:
        """Return in words the origin of a study and model's H."""
        if (study, model) in self._declared or (study, model) in self._horizons:
            return "from the store"
        return "from the rows" if self.requested_horizon is None else "as given"

    def is_control(self, study: str, action: str) -> bool:
        """Tell whether an action is the full-retention control."""
        row = self._action(study, action)
        return action == CONTROL_ACTION if row is None else bool(row["control"])

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

    def offer(self, key: UnitGroup, rows: EventRows, horizon: int, answered: Answer) -> None:
        """Queue those replicates of a unit that the store lacks; ``answered`` is called with the outcome, maybe later.

        ``rows`` are whole replicates in key order.
        """
        offered = _Offer(key, rows, horizon, answered)
        self._stored_overlapping(key, offered.first, offered.end)
        self._enqueue(offered)
        if self._units >= UNITS_PER_COMMIT or self._events >= _EVENTS_PER_COMMIT:
            self.flush()

    def flush(self) -> None:
        """Commit the queued units and answer their offers.

        If the store refuses the commit, another writer may have changed the store since units were compared. All queued
        units are then compared anew, and only units without a contradiction are committed.

        Raises:
            InputError: The store refuses the commit, and no other writer has changed the compared units.
        """
        while True:
            before = self._queue
            try:
                new = self._commit()
                break
            except InputError:
                self._load()
                for offered, _ in before:
                    self._enqueue(offered)
                if [records for _, records in before] == [records for _, records in self._queue]:
                    raise
        if not self._is_durable:
            self._store.stored_units([])
            self._is_durable = True
        self._queue, self._units, self._events = [], 0, 0
        for offered, records in before:
            added = 0
            for record in records:
                number = unit_number(record)
                added += record["replicates"] * (number in new)
                for held in self._held[offered.key]:
                    if held.unit is None and held.first == record["first_replicate"]:
                        held.unit = number
            offered.answered(added)

    def _commit(self) -> set[int]:
        """Commit documents and actions, which views need to show events, then units; return the new units' numbers."""
        for table, rows in ((DOCUMENTS, self._new_documents), (ACTIONS, self._new_actions)):
            if rows:
                self._store.append_rows(table.name, pa.Table.from_pylist(rows, schema=table.schema))
                rows.clear()
        self._stored_events = None
        parts = [
            offered.values(record["first_replicate"], record["first_replicate"] + record["replicates"])
            for offered, records in self._queue
            for record in records
        ]
        if not parts:
            return set()
        records = [record for _, records in self._queue for record in records]
        return self._store.add_pairs(records, {name: np.concatenate([part[name] for part in parts]) for name in VALUES})

    def _enqueue(self, offered: _Offer) -> None:
        """Compare an offer with the store; queue its new replicates, or answer why it cannot go in."""
        spans = self._compared(offered)
        if isinstance(spans, Refusal):
            offered.answered(spans)
            return
        if not spans:
            self._is_durable = False  # another writer's units may not be synced yet
            offered.answered(0)
            return
        key, horizon = offered.key, offered.horizon
        self._horizons.setdefault(key[:2], horizon)
        self._note(key)
        records = []
        for begin, end in spans:
            named = dict(zip(GROUP_KEY, key, strict=True))
            record = named | {"first_replicate": begin, "replicates": end - begin, "horizon": horizon}
            record |= {"estimator": PLAIN, "action_revision": self._revisions.get((key[0], key[3]), 0)}
            records.append(record | self._facts.of_unit(named))
            self._held.setdefault(key, []).append(_Held(begin, end, horizon, None, None))
            self._events += (end - begin) * horizon
        self._units += len(records)
        self._queue.append((offered, records))

    def _compared(self, offered: _Offer) -> list[tuple[int, int]] | Refusal:
        """Return the ranges of replicates that the store lacks, or the reason why the unit cannot go in."""
        key, horizon = offered.key, offered.horizon
        if refusal := self._fault(key, horizon):
            return refusal
        new = np.ones(offered.end - offered.first, dtype=np.bool_)
        for held in self._overlapping(key, offered.first, offered.end):
            if conflict := self._conflict(offered, held):
                return conflict
            new[max(0, held.first - offered.first) : held.end - offered.first] = False
        if new.any() and (key[0], key[1], key[3]) in self._generated:
            made = f"kvdrift generated action '{key[3]}', and a file does not say how its events were made"
            return Refusal("identity", f"{made}; give the events another action name")
        edges = np.flatnonzero(np.diff(np.concatenate(([0], new.astype(np.int8), [0])))) + offered.first
        return [*zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]

    def _fault(self, key: UnitGroup, horizon: int) -> Refusal | None:
        """Return why no unit of a group can go in; None if all is right."""
        study, model, doc, action = key
        row = self._action(study, action)
        if row is not None and row["dropped"]:
            return Refusal("revision", f"action '{action}' was dropped; --revise takes the events as a new revision")
        if (known := self.horizon(study, model)) not in {None, horizon}:
            return Refusal("horizon", f"the horizon is {horizon}, but the study and model have {known}")
        if self._forgotten.of(study, model).has(doc):
            return Refusal("document", "the document was removed from the store for good (kvdrift forget)")
        return self._document_fault(key)

    def _action(self, study: str, action: str) -> dict[str, Any] | None:
        """Return the row of an action's present revision; None if it is still to be written."""
        return self._actions.get((study, action, self._revisions.get((study, action), 0)))

    def _overlapping(self, key: UnitGroup, first: int, end: int) -> list[_Held]:
        return [held for held in self._held.get(key, ()) if held.first < end and first < held.end]

    def _stored_overlapping(self, key: UnitGroup, first: int, end: int) -> list[_Held]:
        """Return the units that have some of replicates ``first`` to ``end`` - 1.

        If some of these replicates are only queued, the queue is committed first.
        """
        if any(held.unit is None for held in self._overlapping(key, first, end)):
            self.flush()
        return self._overlapping(key, first, end)

    def _rows_of(self, held: _Held, key: UnitGroup) -> pa.Table:
        if self._stored_events is None:
            self._stored_events = self._store.rows_of_units("events")
        count = (held.end - held.first) * held.horizon
        (rows,) = self._stored_events.read_each([held.unit or 0], [key[2]], VALUES, count)
        return rows

    def _conflict(self, offered: _Offer, held: _Held) -> Refusal | None:
        """Return how an offer differs from a stored unit that it overlaps; None if the overlap is equal."""
        low, high, horizon = max(offered.first, held.first), min(offered.end, held.end), offered.horizon
        overlap = slice((low - offered.first) * horizon, (high - offered.first) * horizon)
        if held.horizon != horizon:
            what = f"the replicate has horizon {horizon}, but the store has it with horizon {held.horizon}"
            return Refusal("conflict", what, overlap.start)
        if (low, high) == (held.first, held.end) and pairs_sha256(offered.values(low, high)) == held.sha256:
            return None
        rows = offered.rows.take(overlap)
        stored = self._rows_of(held, offered.key).slice((low - held.first) * horizon, len(rows))
        differ = {name: getattr(rows, name) != stored.column(name).to_numpy() for name in VALUES}
        wrong = np.flatnonzero(np.any(list(differ.values()), axis=0))
        if not wrong.size:
            return None
        row = int(wrong[0])
        name = next(name for name in VALUES if differ[name][row])
        here, there = getattr(rows, name)[row].item(), stored.column(name)[row].as_py()
        what = f"{name} is {here!r}, but the store has {there!r}"
        return Refusal("conflict", f"{what}; --revise takes the events as a revision", overlap.start + row, len(wrong))

    def _document_fault(self, key: UnitGroup) -> Refusal | None:
        """Return the fault of a unit's document: it has no row, or contradicts the store; None if all is right."""
        study, model, doc, _ = key
        stored = self._documents.get((study, model, doc))
        row = self._document_rows.find(study, model, doc)
        if row is None:
            absent = Refusal("document", "the document is neither in the store nor in the --documents file")
            return None if stored else absent
        if stored is not None:
            for name, value in row.values.items():
                if stored[name] != value:
                    reason = f"{name} is {value!r} ({row.where}), but the store has {stored[name]!r}"
                    return Refusal("document", reason)
            return None
        split, cluster = row.values["split"], row.values.get("cluster", doc)
        other = self._splits.get((study, model, cluster), split)
        if other != split:
            reason = f"split is '{split}' ({row.where})"
            return Refusal("document", f"{reason}, but cluster '{cluster}' is in split '{other}'")
        return None

    def _note(self, key: UnitGroup) -> None:
        """Queue rows for a unit's document and action if they have none."""
        study, model, doc, action = key
        if (study, model, doc) not in self._documents:
            details = self._document_rows.find(study, model, doc)
            row = {"cluster": doc, **(details.values if details else {}), "study": study, "model": model}
            document = {field.name: row.get(field.name) for field in DOCUMENTS.schema}
            self._documents[study, model, doc] = document
            self._splits[study, model, document["cluster"]] = document["split"]
            self._new_documents.append(document)
        if self._action(study, action) is None:
            revision, control = self._revisions.get((study, action), 0), self.is_control(study, action)
            selector = NUMERICS if action in {FLOOR_ACTION, KERNEL_FLOOR_ACTION} else EXTERNAL
            row = {
                "study": study, "action": action, "selector": selector, "keep": "all" if control else "unknown",
                "position_mode": "unknown", "control": control, "dropped": False,
                "prespecified": control or study not in self._planned or action in self._planned[study],
                **self._facts.of_action(study, model, action), "action_revision": revision,
            }  # fmt: skip
            self._actions[study, action, revision] = row
            self._new_actions.append(row)


class Comparison(Intake):
    """Finds the actions of which a store has other events than the offered ones; nothing is queued.

    Attributes:
        differing: The (study, action) pairs found so far.
    """

    def __init__(self, store: Store, documents: DocumentRows, horizon: int | None = None) -> None:
        super().__init__(store, documents, horizon)
        self.differing = set[tuple[str, str]]()

    def horizon(self, study: str, model: str) -> int | None:  # noqa: ARG002
        """Return the call's H, or None, so that the rows suggest H; not the store's H, which the call may correct."""
        return self.requested_horizon

    def offer(self, key: UnitGroup, rows: EventRows, horizon: int, answered: Answer) -> None:
        """Note the action if the store has other events or another horizon for its units, or has dropped the action."""
        offered = _Offer(key, rows, horizon, answered)
        row = self._action(key[0], key[3])
        known = super().horizon(*key[:2])
        if (
            (row is not None and row["dropped"])
            or known not in {None, horizon}
            or any(self._conflict(offered, held) for held in self._overlapping(key, offered.first, offered.end))
        ):
            self.differing.add((key[0], key[3]))
