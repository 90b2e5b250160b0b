"""A frozen plan as lines to read: its decisions, and the precision expected of each endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.report.printing.numbers import duration, fixed, level
from kvdrift.schema.frozen_text import with_measured
from kvdrift.stats.quantities import PAIR_QUANTITIES
from kvdrift.stats.reduction import saving
from kvdrift.stats.registry import Scale

_HEADS = ("endpoint", "action", "on development", "expected half-width", "level")


def plan_lines(plan: FrozenPlan) -> list[str]:
    """Describe a plan in a few lines and a table of its primary endpoints."""
    content = with_measured(plan.content)
    family = content.get("family_size") or len(content["primary_endpoints"])
    others = [name for name in plan.actions if name != content["baseline"]]
    revision = f"revision {plan.revision}, " if plan.revision else ""
    why = "another study of the store evaluated some of the plan's documents"
    if plan.evaluated:
        why = f"planned after {plan.evaluated} evaluation documents were seen"
    facts = {
        "frozen": f"{plan.frozen_at:%Y-%m-%d %H:%M:%S} UTC, {revision}SHA-256 {plan.sha256}",
        "seen": f"yes: {why}" if plan.seen else "no",
        "K": f"{plan.replicates} replicates",
        "N": f"{plan.documents_per_stratum} documents of each stratum ({', '.join(content['strata'])})",
        "actions": f"{', '.join(others) or 'none'} against {content['baseline']}",
        "levels": f"{level(plan.family.level)} for each of {family} primary endpoints, 95% for all else",
        "target": f"half-width {_number(content['target_half_width'], Scale.POINTS)}; {content['reason']}",
        "saves": saving(content),
        "time": f"{duration(content['expected_seconds'])} of generation are expected",
    }
    if plan.looks is not None:
        counts = [str(sum(interim_look.values())) for interim_look in plan.looks.documents]
        facts["looks"] = (
            f"at {', '.join(counts)} documents; the evaluation stops at the first interim look at which every primary "
            f"endpoint meets this condition, at the latest at N: {plan.looks.resolution}"
        )
    facts = {name: text for name, text in facts.items() if text}
    width = max(map(len, facts))
    lines = [f"plan of study '{plan.study}', model {plan.model}"]
    lines += [f"  {name:<{width}}  {text}" for name, text in facts.items()]
    rows = [_HEADS, *(_row(entry, plan.family.level) for entry in content["primary_endpoints"])]
    return [*lines, *_table(rows)]


def _row(entry: dict[str, Any], endpoint_level: float) -> Sequence[str]:
    scale = PAIR_QUANTITIES[entry["quantity"]].scale
    spread = Scale.POINTS if scale is Scale.PERCENT else scale
    subject = entry["action"] if entry["baseline"] is None else f"{entry['action']} − {entry['baseline']}"
    value, half_width = _number(entry["development_value"], scale), _number(entry["expected_half_width"], spread)
    return entry["quantity"], subject, value, half_width, level(endpoint_level)


def _number(value: float | None, scale: Scale) -> str:
    return "undefined" if value is None else f"{fixed(value * scale.factor, 2)} {scale.sign}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
