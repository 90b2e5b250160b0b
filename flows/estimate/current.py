"""Whether a study's estimates are up to date with the store's events, the plan and the documents."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.log.last_times import LastTimes
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_actions
from kvdrift.stats.quantities import ANSWER_QUANTITIES

if TYPE_CHECKING:
    from kvdrift.flows.estimate.scores import Scoring


def estimates_are_current(store: Store, study: str, model: str) -> bool:
    """Tell whether the study's results were estimated from the present events and documents, under the newest plan."""
    return estimated_version(store, study, model) == store.data_version("events")


def estimated_version(store: Store, study: str, model: str) -> int | None:
    """Return the newest events version behind any results; None without results.

    Only results under the newest plan and from the newest revision of the study's documents count.
    """
    newest = pc.max(_present_rows(store, study, model)["events_version"]).as_py()
    return None if newest is None else int(newest)


def estimated_at(store: Store, study: str, model: str, times: LastTimes) -> datetime | None:
    """Return when the newest estimates of a study were stored, whatever their plan; None if that is not known."""
    at, version = times.estimates.get((study, model), (None, -1))
    if at is None:
        return None
    rows = store.read("results", columns=["study", "model", "events_version"])
    own = pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model))
    stored = rows["events_version"].filter(own).unique().to_pylist()
    return at if version in stored else None  # a killed process had recorded the time, and not stored the estimates


def newest_rows(store: Store, study: str, model: str) -> pa.Table:
    """Return split and quantity of the results at ``estimated_version``."""
    rows = _present_rows(store, study, model)
    return rows.filter(pc.equal(rows["events_version"], pc.max(rows["events_version"])))


def _present_rows(store: Store, study: str, model: str) -> pa.Table:
    """Return the results under the newest plan, from the newest revision of the study's documents."""
    plan = find_plan(store, study, model)
    columns = ["study", "model", "split", "events_version", "plan_sha256", "quantity", "documents_revision"]
    results = store.read("results", columns=columns)
    wanted = {"study": study, "model": model, "plan_sha256": None if plan is None else plan.sha256}
    for name, value in wanted.items():
        results = results.filter(pc.is_in(results[name], value_set=pa.array([value], pa.string())))
    if not results.num_rows:  # behind a URL, reading documents takes requests
        return results
    return results.filter(pc.equal(results["documents_revision"], store.documents_revision(study, model)))


def answers_are_current(store: Store, study: str, model: str, scoring: Scoring) -> bool:
    """Tell whether the newest estimates include answers in each of their splits that has scored answers.

    A split has scored answers if all its pairs are scored, and some pair is of an action other than the control.
    """
    current = current_actions(store.read("actions"), study)
    scored = scoring.scored_splits({name for name, row in current.items() if row["control"]})
    rows = newest_rows(store, study, model)
    of_answers = rows.filter(pc.is_in(rows["quantity"], value_set=pa.array([*ANSWER_QUANTITIES])))
    lacking = set(rows["split"].to_pylist()) - set(of_answers["split"].to_pylist())
    return not lacking & scored
