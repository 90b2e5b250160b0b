"""Calibration of a study: every action's contrast against the plan's baseline, as rows of ``calibration``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa

from flows.analysis.estimation import action_revisions, document_moments
from flows.frozen_plan import FrozenPlan
from schema.store.store import Store
from schema.study import CONTROL_ACTION
from schema.tables import CALIBRATION
from sql.catalog import Views
from stats.calibration import Calibration, calibrate
from stats.intervals import EXPLORATORY, planned_status


def calibrate_study(
    store: Store, views: Views, plan: FrozenPlan, events_version: int, seen: tuple[str, ...] = ()
) -> int:
    """Fit on development documents, judge on evaluation documents, and append the rows to ``calibration``.

    Nothing is written unless both splits have trajectories of the baseline and of another action. A contrast is
    prespecified if the plan names both of its actions, or seen if the outcomes of one were known before.

    Args:
        store: the study's store.
        views: its views.
        plan: the frozen plan, whose baseline, margin, level, draws and seed are used.
        events_version: the version of ``events`` that the views show.
        seen: planned actions whose outcomes were known before.

    Returns:
        The number of rows.

    """
    baseline = plan.content["baseline"]
    measured = [_measured_actions(views, plan, split) for split in ("development", "evaluation")]
    actions = set.intersection(*measured)
    if baseline not in actions or len(actions) < 2:
        return 0
    development, evaluation = (
        document_moments(views, plan.study, plan.model, split) for split in ("development", "evaluation")
    )
    revisions = action_revisions(views, plan.study)
    rows = [
        _row(judged, plan, seen, action, baseline, events_version)
        | {"action_revision": revisions[action], "baseline_revision": revisions[baseline]}
        for action in sorted(actions - {baseline})
        for judged in calibrate(
            development,
            evaluation,
            baseline=baseline,
            action=action,
            draws=plan.draws,
            seed=plan.seed,
            alpha=plan.content["alpha"],
            margin=plan.content["calibration"]["margin"],
        )
    ]
    store.append_rows("calibration", pa.Table.from_pylist(rows, schema=CALIBRATION.schema))
    return len(rows)


def _measured_actions(views: Views, plan: FrozenPlan, split: str) -> set[str]:
    trajectories = views.rows("analyzed_trajectories", study=plan.study, model=plan.model, split=split)
    return set(trajectories["action"].unique().to_pylist()) - {CONTROL_ACTION}


def _row(
    judged: Calibration, plan: FrozenPlan, seen: tuple[str, ...], action: str, baseline: str, events_version: int
) -> dict[str, Any]:
    # An undefined number is null in the store.
    values = {name: None if value != value else value for name, value in dataclasses.asdict(judged).items()}  # noqa: PLR0124
    planned = {action, baseline} <= set(plan.actions)
    return values | {
        "study": plan.study,
        "model": plan.model,
        "action": action,
        "baseline": baseline,
        "status": planned_status(seen, action, baseline) if planned else EXPLORATORY,
        "events_version": events_version,
        "plan_sha256": plan.sha256,
    }
