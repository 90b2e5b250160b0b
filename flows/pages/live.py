"""A study that still runs: its progress, and a page with preliminary estimates that are stored nowhere.

The cost of a snapshot grows with the files since the last snapshot and with documents and actions, not with the log. A
snapshot only reads, and holds no lock that a writer waits for.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.estimation import EXPLORATORY_LEVEL
from kvdrift.flows.estimate.moments import analyzed_splits, document_moments, study_windows
from kvdrift.flows.estimate.scores import estimates_are_current
from kvdrift.flows.pages.reports import waiting_words, writing
from kvdrift.flows.plan.frozen_plan import (
    InterimLooksTaken,
    Row,
    UnitsDone,
    find_plan,
    units_done,
    wanted_by_stratum,
)
from kvdrift.log.counts import Counts
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_actions, current_documents
from kvdrift.sql.catalog import MOMENT_VIEWS, Views, open_views
from kvdrift.stats.bootstrap import COLUMNS, Request, estimate
from kvdrift.stats.preliminary import preliminary_mean
from kvdrift.stats.quantities import ANSWER_QUANTITIES, PAIR_QUANTITIES

RATE_SECONDS = 120.0  # the time over which the rate is taken

_GROUP = ("study", "model", "doc", "action", "action_revision")

Sums = dict[tuple[Any, ...], tuple[int, ...]]
"""By key, a number of pairs, and their mismatches, positions and divergences."""


@dataclass(frozen=True)
class Divergence:
    """The divergence of an action's trajectories so far: R (``mismatch``) and the probability that they diverge.

    The ends of the 95% intervals are None if they are unknown yet.
    """

    action: str
    documents: int
    mismatch: float
    mismatch_low: float | None
    mismatch_high: float | None
    probability: float
    probability_low: float | None
    probability_high: float | None


@dataclass(frozen=True)
class StudySnapshot:
    """The progress of a study and model at one time."""

    study: str
    model: str
    work: tuple[UnitsDone, ...]  # Units done and wanted, by split and action
    planned: bool  # Whether the evaluation is planned
    stored: int  # Units of any size that are committed
    derived: int  # Trajectories that are derived
    rate: float | None  # Units done per second lately; None before two snapshots
    split: str | None  # The split of ``divergence``; None if nothing is derived
    divergence: tuple[Divergence, ...]  # The divergence of each action
    finished: bool  # Whether everything is generated and estimated as planned
    taken: InterimLooksTaken | None = None  # the interim looks taken; None if the study is not sequential

    @property
    def done(self) -> int:
        """The number of units done, over all splits and actions."""
        return sum(work.done for work in self.work)

    @property
    def wanted(self) -> int:
        """The number of units wanted, over all splits and actions, as far as it is known."""
        return sum(work.wanted for work in self.work)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that the remaining units take at the present rate; None if the rate is unknown."""
        return (self.wanted - self.done) / self.rate if self.rate else None


class LiveStore:
    """A store whose progress is read repeatedly."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: dict[tuple[str, str], deque[tuple[float, int]]] = defaultdict(deque)

    def snapshots(self) -> list[StudySnapshot]:
        """Count units and trajectories; return a snapshot of each study and model."""
        actions = self._store.read("actions")
        counts = self._store.counts(actions)
        documents = defaultdict[tuple[str, str], dict[str, Row]](dict)
        columns = ["study", "model", "doc", "split", "stratum", "cluster", "document_revision"]
        for row in current_documents(self._store.read("documents", columns=columns)).to_pylist():
            documents[row["study"], row["model"]][row["doc"]] = row
        sums = _pair_sums(self._store)
        ours = {(row["study"], row["model"]) for row in self._store.read("studies").to_pylist()}
        return [
            self._snapshot(
                study, model, current_actions(actions, study), counts.of_study(study, model), rows, sums,
                ours=(study, model) in ours,
            )
            for (study, model), rows in sorted(documents.items())
        ]  # fmt: skip

    def _snapshot(
        self, study: str, model: str, actions: dict[str, Row], counts: Counts, documents: dict[str, Row], sums: Sums,
        *, ours: bool,
    ) -> StudySnapshot:  # fmt: skip
        groups = {
            (doc, action): of
            for (name, of_model, doc, action, revision), of in sums.items()
            if (name, of_model) == (study, model) and doc in documents
            and action in actions and revision == actions[action]["action_revision"]
        }  # fmt: skip
        plan = find_plan(self._store, study, model)
        taken = None if plan is None else InterimLooksTaken.in_store(self._store, plan)
        by_now = {} if plan is None else wanted_by_stratum(plan, taken)
        work = units_done(actions, counts, plan, by_now) if ours else []
        splits = {documents[doc]["split"] for doc, _ in groups}
        split = max(splits, default=None)  # the evaluation, as soon as it has trajectories
        stored = sum(held.units * count for (_, held), count in counts.units.items())
        done = sum(part.done for part in work) if ours else stored
        left = sum(part.wanted for part in work) - done
        return StudySnapshot(
            study, model, tuple(work), plan is not None, stored,
            sum(of[0] for of in groups.values()), self._rate((study, model), done), split,
            tuple(_divergence(actions, documents, groups, split)),
            finished=ours and plan is not None and not left and (taken is None or taken.stopped)
            and estimates_are_current(self._store, study, model),
            taken=taken,
        )  # fmt: skip

    def _rate(self, of: tuple[str, str], done: int) -> float | None:
        now, counts = time.monotonic(), self._done[of]
        counts.append((now, done))
        while counts[0][0] < now - RATE_SECONDS and len(counts) > 2:
            counts.popleft()
        seconds = now - counts[0][0]
        return max(0.0, (done - counts[0][1]) / seconds) if seconds else None


def _pair_sums(store: Store) -> Sums:
    """Count the complete pairs of each document, action and revision, with their sums; only new files are read."""
    totals: Sums = {}
    for part in store.of_files("trajectories", [*_GROUP, "complete", "horizon", "tau", "mismatches"], _sums):
        for group, sums in part.items():
            totals[group] = tuple(map(sum, zip(totals[group], sums, strict=True))) if group in totals else sums
    return totals


def _sums(pairs: pa.Table) -> Sums:
    pairs = pairs.append_column("apart", pairs["tau"].is_valid().cast(pa.int64())).filter(pairs["complete"])
    names = ("mismatches", "horizon", "apart")
    grouped = pairs.group_by([*_GROUP], use_threads=False).aggregate([([], "count_all"), *((n, "sum") for n in names)])
    columns = (grouped[name].to_pylist() for name in (*_GROUP, "count_all", *(f"{name}_sum" for name in names)))
    return {row[: len(_GROUP)]: row[len(_GROUP) :] for row in zip(*columns, strict=True)}


def _divergence(
    actions: Mapping[str, Row],
    documents: Mapping[str, Row],
    groups: Sums,
    split: str | None,
) -> Iterator[Divergence]:
    for name, row in sorted(actions.items()):
        sums_by_doc = {doc: sums for (doc, action), sums in groups.items() if action == name}
        sums_by_doc = {doc: sums for doc, sums in sums_by_doc.items() if documents[doc]["split"] == split}
        if row["control"] or not sums_by_doc:
            continue
        strata, clusters = ([documents[doc][column] for doc in sums_by_doc] for column in ("stratum", "cluster"))
        mismatch = [mismatches / positions for _, mismatches, positions, _ in sums_by_doc.values()]
        apart = [diverged / replicates for replicates, _, _, diverged in sums_by_doc.values()]
        means = [preliminary_mean(values, strata, clusters) for values in (mismatch, apart)]
        yield Divergence(name, len(sums_by_doc), *means[0], *means[1])


_DRAWS = 400  # ten draws lie beyond each end at 95%; every snapshot repeats them
_QUANTITIES = [name for name in PAIR_QUANTITIES if name not in ANSWER_QUANTITIES]  # answers are scored only at the end


@dataclass(frozen=True)
class PreliminaryViews:
    """The views of a store, with preliminary estimates from the present pairs in place of the stored estimates.

    Preliminary estimates are exploratory even if a plan names them: their documents are not yet the plan's, and
    repeated estimates mislead more often than their level says.
    """

    views: Views
    study: str
    model: str

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: object) -> pa.Table:
        """Return rows of ``view`` whose columns equal the given values; view ``estimates`` comes with all columns."""
        if view != "estimates":
            return self.views.rows(view, columns, **equal)
        rows = self._estimates
        for name, value in equal.items():
            rows = rows.filter(pc.equal(rows[name], pa.scalar(value)))
        return rows

    @cached_property
    def _estimates(self) -> pa.Table:
        splits = analyzed_splits(self.views, self.study, self.model)
        windows = study_windows(self.views, self.study, self.model)
        parts = []
        for split in splits:
            moments = document_moments(self.views, self.study, self.model, split, windows)
            estimates = estimate(
                moments, draws=_DRAWS, seed=0, request=Request(EXPLORATORY_LEVEL), quantities=_QUANTITIES,
                pairs=list(itertools.permutations(moments.actions, 2)),
            )  # fmt: skip
            columns = {name: estimates.columns[name] for name in COLUMNS}
            constant = {"study": self.study, "model": self.model, "split": split}
            parts.append(pa.table({**{name: [value] * len(estimates) for name, value in constant.items()}, **columns}))
        return pa.concat_tables(parts, promote_options="permissive")


def write_preliminary(
    store: Store,
    study: str,
    model: str,
    folder: Path,
    progress: str,
    *,
    token_text: Callable[[int], str] | None = None,
) -> Path:
    """Write the page of a study that still runs, with estimates of the pairs that are derived; return its path.

    ``progress`` is the study's progress, as a sentence. Without ``token_text`` the examples show token ids.
    """
    from kvdrift.report.page import build_report  # noqa: PLC0415 - only to draw a page
    from kvdrift.report.reading.estimates import Provenance  # noqa: PLC0415

    waiting = waiting_words(store, study, model)
    with writing(folder), open_views(store, kept=MOMENT_VIEWS) as views:
        return build_report(
            PreliminaryViews(views, study, model), study, model, folder,
            token_text=token_text,
            provenance=Provenance(Path(store.location).name, views.versions, waiting=waiting),
            preliminary=progress,
        )  # fmt: skip


def end_preliminary(folder: Path, study: str, report: Path, store: str) -> None:
    """Replace a finished study's preliminary page by a link to its report; any other page stays.

    The report need not exist yet; ``store`` is the store's name as commands take it.
    """
    from kvdrift.report.page import RELOADING, write_ended  # noqa: PLC0415 - as above

    page = folder / "index.html"
    if page.is_file() and RELOADING in page.read_text(encoding="utf-8"):
        with writing(folder):
            write_ended(study, report, store, folder)
