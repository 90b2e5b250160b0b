"""Calibration of a study: every action's contrast against the plan's baseline, as rows of ``calibration``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kvdrift.flows.estimate.estimation import action_revisions, documents_revision
from kvdrift.flows.estimate.standing import inputs_sha256, standing_rows
from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.log.store import Store
from kvdrift.schema.tables import CALIBRATION
from kvdrift.sql.catalog import Views
from kvdrift.stats.calibration import Calibration, calibrate
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.resampling.intervals import EXPLORATORY, planned_status


def calibrate_study(
    store: Store,
    views: Views,
    plan: FrozenPlan,
    events_version: int,
    moments: Mapping[str, DocumentMoments],
    seen: tuple[str, ...] = (),
) -> int:
    """Fit on development documents, judge on evaluation documents, and append the rows to ``calibration``.

    Nothing is written unless the baseline and another action have moments in both splits. Rows of a contrast with
    unchanged inputs are kept. A contrast is prespecified if the plan names both of its actions, or seen if the outcomes
    of either were known before the plan.

    The number of rows that were made now is returned. ``events_version`` is the version that the views show.
    """
    if not {"development", "evaluation"} <= moments.keys():
        return 0
    development, evaluation, baseline = moments["development"], moments["evaluation"], plan.content["baseline"]
    actions = set(development.actions) & set(evaluation.actions)
    if baseline not in actions:
        return 0
    revisions = action_revisions(views, plan.study)
    settings = {
        "baseline": baseline, "draws": plan.draws, "seed": plan.seed, "alpha": plan.content["alpha"],
        "margin": plan.content["calibration"]["margin"], "interval": plan.interval,
    }  # fmt: skip
    inputs = {}
    for action in sorted(actions - {baseline}):
        pair = (baseline, action)
        own = [split.of_actions(pair) for split in (development, evaluation)]
        inputs[action] = inputs_sha256(
            settings, plan.sha256, [name in plan.actions for name in pair], [name in seen for name in pair],
            [revisions[name] for name in pair], *own,
        )  # fmt: skip
    cited = {"events_version": events_version, "documents_revision": documents_revision(views, plan.study, plan.model)}
    standing = standing_rows(store, "calibration", inputs.values(), cited)
    there = set(standing["inputs_sha256"].to_pylist())
    rows = [
        _row(judged, plan, seen, action, baseline) | cited
        | {"action_revision": revisions[action], "baseline_revision": revisions[baseline], "inputs_sha256": sha256}
        for action, sha256 in inputs.items() if sha256 not in there
        for judged in calibrate(development, evaluation, action=action, **settings)
    ]  # fmt: skip
    new = pa.Table.from_pylist(rows, schema=CALIBRATION.schema)
    order = [(name, "ascending") for name in ("action", "observation", "candidate")]
    store.append_rows("calibration", pa.concat_tables([standing, new]).sort_by(order))
    return len(rows)


def _row(judged: Calibration, plan: FrozenPlan, seen: tuple[str, ...], action: str, baseline: str) -> dict[str, Any]:
    # an undefined number is null in the store
    values = {name: None if value != value else value for name, value in dataclasses.asdict(judged).items()}  # noqa: PLR0124
    planned = {action, baseline} <= set(plan.actions)
    return values | {
        "study": plan.study,
        "model": plan.model,
        "action": action,
        "baseline": baseline,
        "status": planned_status(seen, action, baseline) if planned else EXPLORATORY,
        "plan_sha256": plan.sha256,
    }
