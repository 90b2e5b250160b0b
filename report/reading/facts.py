"""The facts of a study besides its estimates: documents, actions, bytes, controls, time, plan."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvdrift.report.reading.estimates import StudyRows, ViewRow
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.study import FINITE_STATE, FLOOR_ACTION, NUMERICS
from kvdrift.schema.study.described import described_action
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.schema.windows import Windows

EVALUATION = "evaluation"
DEVELOPMENT = "development"
FEW_IN_STRATUM = 10  # clusters: fewer make intervals unsure
_SAME = 0.005  # relative differences of bytes below this count as the same budget


@dataclass(frozen=True)
class Storage:
    """The storage and cost of one action, from its units; a policy's bytes are the most that it ever holds."""

    kept_entries: list[int | None]  # one value per document
    replicates: list[int]  # coupled pairs of each document that has any
    branchings: list[int]  # replicates of residual branching of each document that has any
    prompt_cache: dict[str, int | None]  # bytes by document that all its replicates share; None if unknown
    payload_bytes: float | None  # mean bytes of keys and values over documents
    side_bytes: float | None  # mean bytes of scales, indices and metadata over documents
    added_bytes: float | None  # mean bytes that each replicate adds to the prompt's cache
    seconds: float | None  # prefill and decoding of all units
    kernel_evaluations: int | None  # of all units
    weight_bytes: int | None = None  # of the weight files of its side; None if unknown
    # mean part of the payload that no action can evict, over documents; None if unknown
    fixed_bytes: float | None = None

    @property
    def mean_prompt_cache(self) -> float | None:
        """Mean bytes of the prompt's cache over documents."""
        return mean(self.prompt_cache.values())


def read_storage(units: list[ViewRow]) -> dict[str, Storage]:
    """Return the storage and cost of each action of some units."""
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
            prompt_cache={doc: _prompt_cache(ranges[0]) for doc, ranges in documents.items()},
            payload_bytes=mean(ranges[0]["payload_bytes"] for ranges in documents.values()),
            side_bytes=mean(total(_sides(ranges[0])) for ranges in documents.values()),
            added_bytes=mean(_added_by_one(ranges[0]) for ranges in documents.values()),
            seconds=total(row[name] for row in rows for name in ("prefill_seconds", "decode_seconds")),
            kernel_evaluations=total(row["kernel_evaluations"] for row in rows),
            weight_bytes=max((row["weight_bytes"] for row in rows if row["weight_bytes"] is not None), default=None),
            fixed_bytes=mean(ranges[0]["fixed_bytes"] for ranges in documents.values()),
        )
    return stored


def _replicates(documents: dict[str, list[ViewRow]], estimator: str) -> list[int]:
    counts = [sum(row["replicates"] for row in units if row["estimator"] == estimator) for units in documents.values()]
    return [total for total in counts if total]


def _added_by_one(unit: ViewRow) -> float | None:
    """Return the bytes that each of a unit's replicates adds to the prompt's cache; None if unknown."""
    shared = _prompt_cache(unit)
    if shared is None or unit["resident_bytes"] is None or not unit["replicates"]:
        return None
    return float((unit["resident_bytes"] - shared) / unit["replicates"])


def _prompt_cache(unit: ViewRow) -> int | None:
    return None if unit["payload_bytes"] is None else total((unit["payload_bytes"], *_sides(unit)))


def _sides(unit: ViewRow) -> list[int | None]:
    return [unit[f"{part}_bytes"] for part in ("scale", "index", "metadata")]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[Any]) -> Any:
    """Return the sum of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True)
class Control:
    """A full-retention control: the number of pairs, and whether every δ and f is exactly 0 (true without pairs)."""

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
        """The number of evaluation documents that had units when the plan was frozen."""
        return int(self.content.get("evaluated_documents", 0))


@dataclass(frozen=True)
class Facts:
    """The facts of a study, read once."""

    study: str
    model: str
    seed: int | None
    study_sha256: str | None
    windows: Windows
    documents: list[ViewRow]  # the documents with events
    unmeasured: int  # how many documents have no events
    listed: Mapping[tuple[str, str], int]  # how many documents there are by stratum and split, with and without events
    actions: list[ViewRow]  # rows of the view ``actions``, controls included
    storage: dict[str, Storage]  # the storage and cost of each action
    controls: list[Control]
    plan: StoredPlan | None
    devices: list[str]  # device and dtype of the units
    libraries: dict[str, str]  # versions that the units were generated with
    branched: bool  # whether any unit is of residual branching
    sampling: Sampling | None  # temperature and truncation; None if another generator made the events
    settings: str | None  # the settings that decide the events, as JSON; None if unknown
    engines: list[str]  # the engines that decoded, in words, with the reference's settings; empty if kvdrift decoded
    eos_tokens: tuple[int, ...] | None  # the tokens that end a text; None if unknown

    @property
    def has_chats(self) -> bool:
        """Whether prompts of some documents went through the model's chat template."""
        sections = [] if self.settings is None else json.loads(self.settings)["documents"]
        return any(section.get("chat_template") for section in sections)

    @property
    def other_sampling(self) -> str:
        """The sampling in words if it is not the full softmax at temperature 1; else empty."""
        return "" if self.sampling is None else self.sampling.other_words

    @property
    def compared(self) -> list[str]:
        """Actions that are not controls, in name order."""
        return [row["action"] for row in self.actions if not row["control"]]

    @property
    def added(self) -> list[str]:
        """The actions that were added after the plan was frozen; none if the study has no plan."""
        planned = self.plan.content.get("actions", self.compared) if self.plan else self.compared
        return [action for action in self.compared if action not in planned]

    def described(self, action: str) -> str:
        """Describe what an action does; empty if unknown."""
        return next((described_action(row) for row in self.actions if row["action"] == action), "")

    @property
    def noise_floors(self) -> list[str]:
        """Actions that keep the whole cache: an engine's repeated reference, and caches computed in another way."""
        return [row["action"] for row in self.actions if row["selector"] == NUMERICS]

    @property
    def kernel_floors(self) -> list[str]:
        """The noise floors that compute the cache in another way; they show the effect of rounding alone."""
        return [name for name in self.noise_floors if not (self.engine and name == FLOOR_ACTION)]

    @property
    def engine(self) -> bool:
        """Whether an engine decoded, so that actions are its settings and weights."""
        return any(row["settings"] is not None for row in self.actions)

    @property
    def own_weights(self) -> bool:
        """Whether the weights of any action differ from the reference's."""
        return any(row["weights"] is not None for row in self.actions)

    @property
    def whole(self) -> str:
        """The name of the reference side in sentences."""
        return "the reference" if self.finite or self.engine or self.own_weights else "the full cache"

    @property
    def other(self) -> str:
        """The name of the action's side in sentences."""
        return "the action" if self.finite or self.engine or self.own_weights else "the compressed model"

    @property
    def whole_cache(self) -> str | None:
        """The action whose bytes are those of the whole cache: the control, or with an engine its floor; else None."""
        floors = self.noise_floors if self.engine else []
        return next((name for name in (*(control.action for control in self.controls), *floors)), None)

    @property
    def policies(self) -> list[str]:
        """The actions that limit how much a step reads; their bytes include generated entries."""
        return [row["action"] for row in self.actions if row["policy"] is not None]

    @property
    def cache(self) -> str:
        """The name, in sentences, of the cache whose bytes are counted."""
        return "cache" if self.policies else "prompt cache"

    @property
    def finite(self) -> bool:
        """Whether the model consists of finite-state systems: no prompts, no cache, all distributions known."""
        return any(row["selector"] == FINITE_STATE for row in self.actions)

    @property
    def strata(self) -> list[str]:
        """Strata in natural order: 4K before 16K."""
        return sorted({row["stratum"] for row in self.documents}, key=natural)

    def count(self, split: str, stratum: str | None = None) -> int:
        """Return the number of documents of a split, in one stratum or in all."""
        return sum(row["split"] == split and stratum in {None, row["stratum"]} for row in self.documents)

    def clusters(self, split: str, stratum: str | None = None) -> int:
        """Return the number of clusters of documents of a split, in one stratum or in all."""
        rows = (row for row in self.documents if row["split"] == split and stratum in {None, row["stratum"]})
        return len({row["cluster"] or row["doc"] for row in rows})

    def times_bytes(self, action: str, other: str) -> float | None:
        """Return the bytes of an action's prompt caches, divided by those of another action's; None if unknown.

        Both are sums over the documents that both actions have. A ratio within half a percent of 1 is returned as 1.
        """
        first, second = (self.storage[name].prompt_cache if name in self.storage else {} for name in (action, other))
        shared = sorted(first.keys() & second.keys())
        mine, theirs = (total(held[doc] for doc in shared) for held in (first, second))
        if not mine or not theirs or any(held[doc] is None for held in (first, second) for doc in shared):
            return None
        ratio = float(mine / theirs)
        return 1.0 if abs(ratio - 1) < _SAME else ratio

    def share_of_whole(self, action: str) -> float | None:
        """Return the bytes of an action's cache as a share of the full cache's; None if either is unknown."""
        return None if self.whole_cache is None else self.times_bytes(action, self.whole_cache)

    def same_weights(self, action: str, other: str) -> bool:
        """Tell whether two actions have the same weights, so that they differ only in the bytes of the cache."""
        return self.weights(action) == self.weights(other)

    def weights(self, action: str) -> str | None:
        """Return the weights of an action's side; None if they are the reference's."""
        return next((row["weights"] for row in self.actions if row["action"] == action), None)

    def cache_bytes(self, action: str) -> float | None:
        """Return the mean bytes of an action's prompt caches; None if unknown."""
        return self.storage[action].mean_prompt_cache if action in self.storage else None

    def weight_bytes(self, action: str) -> int | None:
        """Return the bytes of the weights of an action's side; None if unknown."""
        return self.storage[action].weight_bytes if action in self.storage else None

    def no_more_weights(self, action: str, other: str) -> bool:
        """Tell whether an action's weights are those of another action, or are known to take no more bytes."""
        mine, theirs = self.weight_bytes(action), self.weight_bytes(other)
        return self.same_weights(action, other) or (mine is not None and theirs is not None and mine <= theirs)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that reads digits as numbers."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def read_facts(source: StudyRows) -> Facts:
    """Read the facts of a study and model.

    Raises:
        InputError: The store does not have the study with this model.
    """
    # Events of another generator have no row in table studies; their windows follow from the horizon.
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
        storage=read_storage(judged),
        controls=_controls(source, actions),
        plan=_plan(source),
        devices=sorted({f"{unit['device']}, {unit['dtype']}" for unit in units if unit["device"]}),
        libraries=_libraries(units),
        branched=any(unit["estimator"] == SWRB for unit in units),
        sampling=Sampling.of(studies[0]) if studies else None,
        settings=stored["settings"],
        eos_tokens=_eos_tokens(units),
        engines=sorted({_engine(json.loads(text)) for text in {unit["engine"] for unit in units if unit["engine"]}}),
    )


def _controls(source: StudyRows, actions: list[ViewRow]) -> list[Control]:
    by_action: dict[str, list[ViewRow]] = {action["action"]: [] for action in actions if action["control"]}
    for row in source.of("controls"):  # one control for each split
        by_action[row["action"]].append(row)
    controls = []
    for action, rows in by_action.items():
        documents, pairs, moved = (sum(row[name] for row in rows) for name in ("documents", "pairs", "moved_pairs"))
        controls.append(Control(action, documents, pairs, zero=not moved))
    return controls


def _engine(reported: dict[str, Any]) -> str:
    """Describe an engine: its name, the library, the reference's settings, and the settings that actions change."""
    named = ", ".join(str(reported[key]) for key in ("engine", "library", "build") if reported.get(key))
    settings = ", ".join(f"{name} {str(value).lower()}" for name, value in (reported.get("reference") or {}).items())
    environment = ", ".join(f"{name}={value}" for name, value in (reported.get("environment") or {}).items())
    server = reported.get("reference_said") or {}
    served = " ".join(str(server[key]) for key in ("server", "version", "build_info") if server.get(key))
    parts = (
        named,
        served and f"the reference’s server {served}",
        settings and f"the reference with {settings}",
        environment and f"environment {environment}",
    )
    return "; ".join(filter(None, parts))


def _eos_tokens(units: list[ViewRow]) -> tuple[int, ...] | None:
    """Return the tokens that end a text, which are the same in all units of a model."""
    written = next((unit["eos_tokens"] for unit in units if unit["eos_tokens"] is not None), None)
    return None if written is None else tuple(int(token) for token in written.split(",") if token)


def _plan(source: StudyRows) -> StoredPlan | None:
    rows = source.of("plans")
    if not rows:
        return None
    row = max(rows, key=lambda row: row["plan_revision"])
    frozen_at = row["frozen_at"].strftime("%Y-%m-%d %H:%M:%S UTC") if row["frozen_at"] else ""
    content = json.loads(row["plan"])
    return StoredPlan(row["plan_sha256"], frozen_at, row["events_version"], content, row["plan_revision"])


def _libraries(units: list[ViewRow]) -> dict[str, str]:
    """Return the versions of libraries that made the units; several versions of a library are listed together."""
    seen: dict[str, set[str]] = defaultdict(set)
    for text in sorted({unit["versions"] for unit in units if unit["versions"]}):
        for name, version in json.loads(text).items():
            seen[name].add(str(version))
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(seen.items())}
