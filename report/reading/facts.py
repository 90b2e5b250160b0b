"""What is known about a study besides its estimates: documents, actions, bytes, controls, time, plan."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from report.reading.source import StudyRows, ViewRow
from schema.errors import InputError, nearest
from schema.sampling import SamplingLaw
from schema.study import FINITE_STATE, NUMERICS
from schema.study.described import described_action
from schema.tables import PLAIN, SWRB
from schema.windows import Windows

EVALUATION = "evaluation"
DEVELOPMENT = "development"


_RESIDENT = 4  # parts of a document's bytes before the resident ones
_SAME = 0.005  # bytes that differ by less count as the same budget


@dataclass(frozen=True)
class Storage:
    """What one action keeps of the prompts and costs, from its units; of a policy, bytes are the most that it holds.

    Attributes:
        kept_entries: one value per document.
        replicates: coupled pairs of each document that has some.
        branchings: replicates of residual branching of each document that has some.
        resident: bytes by document: payload, scales, index, metadata, resident.
        per_replicate: bytes by document that each replicate adds to the prompt's cache; None where it is not known.
        seconds: prefill and decoding of all units.
        kernel_evaluations: of all units.

    """

    kept_entries: list[int | None]
    replicates: list[int]
    branchings: list[int]
    resident: dict[str, tuple[int | None, ...]]
    per_replicate: dict[str, float | None]
    seconds: float | None
    kernel_evaluations: int | None

    def mean_bytes(self, part: int) -> float | None:
        """Mean over documents: part 0 payload, 1 scales, 2 index, 3 metadata, 4 resident."""
        return mean(parts[part] for parts in self.resident.values())

    @property
    def prompt_cache(self) -> dict[str, int | None]:
        """Bytes of the prompt's cache by document, which all replicates share: all but the resident ones."""
        return {doc: None if parts[0] is None else total(parts[:_RESIDENT]) for doc, parts in self.resident.items()}

    @property
    def mean_prompt_cache(self) -> float | None:
        """Mean bytes of the prompt's cache over documents."""
        return mean(self.prompt_cache.values())


@dataclass(frozen=True)
class Control:
    """A full-retention control: how many pairs, and whether every δ and f is exactly 0 (true without pairs)."""

    action: str
    documents: int
    pairs: int
    zero: bool


@dataclass(frozen=True)
class StoredPlan:
    """The newest revision of the frozen plan; ``content`` is its JSON."""

    sha256: str
    frozen_at: str
    events_version: int | None
    content: dict[str, Any]
    revision: int = 0

    @property
    def evaluated(self) -> int:
        """How many evaluation documents had units when it was frozen."""
        return int(self.content.get("evaluated_documents", 0))


@dataclass(frozen=True)
class Facts:
    """What is known about a study, read once.

    Attributes:
        documents: the documents with events.
        unmeasured: how many documents have no events.
        listed: how many documents there are by stratum and split, with and without events.
        actions: rows of the view ``actions``, controls included.
        storage: what each action keeps and costs.
        devices: device and dtype of the units.
        libraries: versions that the units were generated with.
        branched: whether any unit is of residual branching.
        law: what tokens are drawn by; None where another generator made the events.
        settings: what decides the events, as JSON; None where the store does not say.
        engines: what decoded, in words, with the reference's settings; empty where kvdrift did.

    """

    study: str
    model: str
    seed: int | None
    study_sha256: str | None
    windows: Windows
    documents: list[ViewRow]
    unmeasured: int
    listed: Mapping[tuple[str, str], int]
    actions: list[ViewRow]
    storage: dict[str, Storage]
    controls: list[Control]
    plan: StoredPlan | None
    devices: list[str]
    libraries: dict[str, str]
    branched: bool
    law: SamplingLaw | None
    settings: str | None
    engines: list[str]

    @property
    def other_law(self) -> str:
        """The law in words, where it is not the full softmax at temperature 1; else empty."""
        return "" if self.law is None else self.law.other_words

    @property
    def compared(self) -> list[str]:
        """Actions that are not controls, in name order."""
        return [row["action"] for row in self.actions if not row["control"]]

    @property
    def added(self) -> list[str]:
        """The actions that the plan does not name, since they were added after it; none without a plan."""
        planned = self.plan.content.get("actions", self.compared) if self.plan else self.compared
        return [action for action in self.compared if action not in planned]

    def described(self, action: str) -> str:
        """What an action does, in words; empty where nobody said."""
        return next((described_action(row) for row in self.actions if row["action"] == action), "")

    @property
    def noise_floors(self) -> list[str]:
        """The actions that leave out nothing and compute the whole cache another way: what numerics alone do."""
        return [row["action"] for row in self.actions if row["selector"] == NUMERICS]

    @property
    def engine(self) -> bool:
        """Whether an engine decoded, so that actions are its settings and weights."""
        return any(row["settings"] is not None for row in self.actions)

    @property
    def whole(self) -> str:
        """What actions are held against, in words."""
        return "the reference" if self.finite or self.engine else "the full cache"

    @property
    def other(self) -> str:
        """What is held against it, in words."""
        return "the action" if self.finite or self.engine else "the compressed model"

    @property
    def whole_cache(self) -> str | None:
        """The action whose bytes are those of the whole cache: the control, or with an engine its floor."""
        floors = self.noise_floors if self.engine else []
        return next((name for name in (*(control.action for control in self.controls), *floors)), None)

    @property
    def policies(self) -> list[str]:
        """The actions that bound what a step reads; their bytes count what is generated."""
        return [row["action"] for row in self.actions if row["policy"] is not None]

    @property
    def cache(self) -> str:
        """What the bytes of actions are of."""
        return "cache" if self.policies else "prompt cache"

    @property
    def finite(self) -> bool:
        """Whether the model is one of finite-state systems: no prompts, no cache, every law known."""
        return any(row["selector"] == FINITE_STATE for row in self.actions)

    @property
    def strata(self) -> list[str]:
        """Strata in natural order: 4K before 16K."""
        return sorted({row["stratum"] for row in self.documents}, key=natural)

    def count(self, split: str, stratum: str | None = None) -> int:
        """Documents of a split, in one stratum or all."""
        return sum(row["split"] == split and stratum in {None, row["stratum"]} for row in self.documents)

    def times_bytes(self, action: str, other: str) -> float | None:
        """The prompt cache of one action over that of another, on the documents of both; None where it is not known.

        Exactly 1 where they are within half a percent of each other.
        """
        first, second = (self.storage[name].prompt_cache if name in self.storage else {} for name in (action, other))
        shared = sorted(first.keys() & second.keys())
        mine, theirs = (total(held[doc] for doc in shared) for held in (first, second))
        if not mine or not theirs or any(held[doc] is None for held in (first, second) for doc in shared):
            return None
        ratio = float(mine / theirs)
        return 1.0 if abs(ratio - 1) < _SAME else ratio

    def same_weights(self, action: str, other: str) -> bool:
        """Whether two actions have the same weights, so that bytes of the cache are all that they differ by."""
        return self.weights(action) == self.weights(other)

    def weights(self, action: str) -> str | None:
        """What an engine's side has in place of the reference's weights; None where it has those."""
        return next((row["weights"] for row in self.actions if row["action"] == action), None)

    def same_bytes(self, action: str, other: str) -> int | None:
        """Documents on which both actions hold the same bytes in every part; None if any differs or is unknown."""
        first, second = (self.storage[name].resident if name in self.storage else {} for name in (action, other))
        shared = first.keys() & second.keys()
        equal = all(None not in first[doc] and first[doc] == second[doc] for doc in shared)
        return len(shared) if shared and equal else None


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that reads digits as numbers."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def read_facts(source: StudyRows) -> Facts:
    """Read a study's facts."""
    # Events that another generator made have no row in studies; their windows follow from their horizon.
    studies, windows = source.of("studies"), source.of("windows")
    if not windows:
        known = [f"{row['study']} / {row['model']}" for row in source.views.rows("windows").to_pylist()]
        tail = nearest(f"{source.study} / {source.model}", known) if known else "the store has no study"
        raise InputError(f"no study '{source.study}' with model '{source.model}' in this store; {tail}")
    stored = studies[0] if studies else dict.fromkeys(("seed", "study_sha256", "settings"))
    actions = sorted(source.of_study("actions"), key=lambda action: natural(action["action"]))
    units = sorted(source.of("units"), key=lambda unit: (unit["doc"], unit["action"], unit["first_replicate"]))
    listed = sorted(source.of("documents"), key=lambda document: natural(document["doc"]))
    measured = {unit["doc"] for unit in units}
    documents = [document for document in listed if document["doc"] in measured]
    evaluated = {document["doc"] for document in documents if document["split"] == EVALUATION}
    judged = [unit for unit in units if unit["doc"] in evaluated] or units
    return Facts(
        study=source.study,
        model=source.model,
        seed=stored["seed"],
        study_sha256=stored["study_sha256"],
        windows=Windows.from_row(windows[0]),
        documents=documents,
        unmeasured=len(listed) - len(documents),
        listed=Counter((document["stratum"], document["split"]) for document in listed),
        actions=actions,
        storage=_storage(judged),
        controls=_controls(source, actions),
        plan=_plan(source),
        devices=sorted({f"{unit['device']}, {unit['dtype']}" for unit in units if unit["device"]}),
        libraries=_libraries(units),
        branched=any(unit["estimator"] == SWRB for unit in units),
        law=SamplingLaw.of(studies[0]) if studies else None,
        settings=stored["settings"],
        engines=sorted({_engine(json.loads(text)) for text in {unit["engine"] for unit in units if unit["engine"]}}),
    )


def _storage(units: list[ViewRow]) -> dict[str, Storage]:
    by_action: dict[str, dict[str, list[ViewRow]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        by_action[unit["action"]][unit["doc"]].append(unit)
    stored = {}
    for action, documents in by_action.items():
        rows = [row for ranges in documents.values() for row in ranges]
        stored[action] = Storage(
            kept_entries=[ranges[0]["kept_entries"] for ranges in documents.values()],
            replicates=_replicates(documents, PLAIN),
            branchings=_replicates(documents, SWRB),
            resident={doc: _resident(ranges[0]) for doc, ranges in documents.items()},
            per_replicate={doc: _added_by_one(ranges[0]) for doc, ranges in documents.items()},
            seconds=total(_sum(rows, name) for name in ("prefill_seconds", "decode_seconds")),
            kernel_evaluations=_sum(rows, "kernel_evaluations"),
        )
    return stored


def _replicates(documents: dict[str, list[ViewRow]], estimator: str) -> list[int]:
    """Replicates of an estimator, of each document that has some."""
    counts = [sum(row["replicates"] for row in units if row["estimator"] == estimator) for units in documents.values()]
    return [total for total in counts if total]


def _added_by_one(unit: ViewRow) -> float | None:
    """What each of a unit's replicates adds to the prompt's cache, in bytes; None where it is not known."""
    payload, scales, index, metadata, resident = _resident(unit)
    if resident is None or payload is None or not unit["replicates"]:
        return None
    return float((resident - total((payload, scales, index, metadata))) / unit["replicates"])


def _resident(unit: ViewRow) -> tuple[int | None, ...]:
    """A unit's bytes: payload, scales, index, metadata, and all of them with its streams."""
    scales = unit["scale_bytes"] or 0  # null in units of older versions, which had no scales
    return (unit["payload_bytes"], scales, *(unit[f"{part}_bytes"] for part in ("index", "metadata", "resident")))


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[Any]) -> Any:
    """The sum of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum(rows: list[ViewRow], column: str) -> Any:
    return total(row[column] for row in rows)


def _controls(source: StudyRows, actions: list[ViewRow]) -> list[Control]:
    found: dict[str, list[ViewRow]] = {action["action"]: [] for action in actions if action["control"]}
    for row in source.of("controls"):  # one for each split
        found[row["action"]].append(row)
    controls = []
    for action, rows in found.items():
        documents, pairs, moved = (sum(row[name] for row in rows) for name in ("documents", "pairs", "moved_pairs"))
        controls.append(Control(action, documents, pairs, zero=not moved))
    return controls


def _engine(said: dict[str, Any]) -> str:
    """An engine in words: what it is called, the library, the settings of the reference, and what moves it."""
    named = ", ".join(str(said[key]) for key in ("engine", "library", "build") if said.get(key))
    settings = ", ".join(f"{name} {str(value).lower()}" for name, value in (said.get("reference") or {}).items())
    environment = ", ".join(f"{name}={value}" for name, value in (said.get("environment") or {}).items())
    server = said.get("reference_said") or {}
    served = " ".join(str(server[key]) for key in ("server", "version", "build_info") if server.get(key))
    parts = (
        named,
        served and f"the reference’s server {served}",
        settings and f"the reference with {settings}",
        environment and f"environment {environment}",
    )
    return "; ".join(filter(None, parts))


def _plan(source: StudyRows) -> StoredPlan | None:
    rows = source.of("plans")
    if not rows:
        return None
    row = max(rows, key=lambda row: row["plan_revision"])
    frozen_at = row["frozen_at"].strftime("%Y-%m-%d %H:%M:%S UTC") if row["frozen_at"] else ""
    content = json.loads(row["plan"])
    return StoredPlan(row["plan_sha256"], frozen_at, row["events_version"], content, row["plan_revision"])


def _libraries(units: list[ViewRow]) -> dict[str, str]:
    """Library versions that the units were made with; several versions of one library stand side by side."""
    seen: dict[str, set[str]] = defaultdict(set)
    for text in sorted({unit["versions"] for unit in units if unit["versions"]}):
        for name, version in json.loads(text).items():
            seen[name].add(str(version))
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(seen.items())}
