"""A study's facts as rows and tables: what was run, documents per stratum, what each action keeps and costs."""

from __future__ import annotations

from report.printing.blocks import Cell, Column, Row, Table, label_column, text_cell
from report.printing.numbers import MISSING, count, count_range, duration, level, size
from report.reading.estimates import Estimates
from report.reading.facts import DEVELOPMENT, EVALUATION, Control, Facts, Storage


def documents_table(facts: Facts) -> Table:
    """Documents per stratum and split."""
    rows = [
        Row((
            text_cell(stratum),
            Cell(count(facts.count(DEVELOPMENT, stratum))),
            Cell(count(facts.count(EVALUATION, stratum))),
            Cell(count_range(row["prompt_tokens"] for row in facts.documents if row["stratum"] == stratum)),
        ))
        for stratum in facts.strata
    ]  # fmt: skip
    total = (text_cell("all"), Cell(count(facts.count(DEVELOPMENT))), Cell(count(facts.count(EVALUATION))))
    rows.append(Row((*total, Cell(count_range(row["prompt_tokens"] for row in facts.documents)))))
    columns = (label_column("stratum"), Column("development"), Column("evaluation"))
    if facts.finite:
        systems = [Row(row.cells[: len(columns)]) for row in rows]
        return Table("documents", "Systems", columns, tuple(systems))
    return Table("documents", "Documents", (*columns, Column("prompt length n", "tokens")), tuple(rows))


def actions_table(facts: Facts, order: list[str]) -> Table:
    """What each action keeps, the bytes it holds and the time it took: actions in ``order``, then controls."""
    if facts.finite:
        return _laws_table(facts, order)
    rows = []
    places = {name: place for place, name in enumerate(order)}
    for action in sorted(facts.actions, key=lambda row: places.get(row["action"], len(places))):
        stored = facts.storage.get(action["action"])
        added = "" if action["prespecified"] else "added after the plan"
        if action["control"]:
            added = "control"
        label = (Cell(action["action"], added, left=True), Cell(action["selector"], left=True), Cell(action["keep"]))
        if stored is None:
            rows.append(Row((*label, *(Cell(MISSING) for _ in range(6)))))
            continue
        overhead = [value for value in (stored.mean_bytes(1), stored.mean_bytes(2)) if value is not None]
        rows.append(
            Row((
                *label,
                Cell(count_range(stored.kept_entries)),
                Cell(size(stored.mean_bytes(0))),
                Cell(size(sum(overhead) if overhead else None)),
                Cell(size(stored.mean_bytes(3))),
                _replicates(stored),
                Cell(duration(_seconds(stored))),
            ))
        )  # fmt: skip
    columns = (
        label_column("action"),
        label_column("selector"),
        Column("keeps", "", "retention rule: entries, or a fraction of n"),
        Column("entries m", "", "kept prompt entries per KV head and layer"),
        Column("keys, values", "", "mean bytes of kept keys and values per document"),
        Column("index, metadata", "", "mean bytes of indices, lengths and positions per document"),
        Column("resident", "", "mean bytes that stay for decoding all replicates per document, before the first step"),
        Column("K", "", "replicates per document"),
        Column("time", "", "prefill and decoding of all its units"),
    )
    note = "Measured, means over documents."
    return Table("actions", "Actions", columns, tuple(rows), note)


def _laws_table(facts: Facts, order: list[str]) -> Table:
    """The actions of finite-state systems, which keep and hold nothing: replicates and time."""
    rows = [
        Row((text_cell(action), _replicates(facts.storage[action]), Cell(duration(_seconds(facts.storage[action])))))
        for action in order if action in facts.storage
    ]  # fmt: skip
    columns = (label_column("action"), Column("K", "", "replicates per system"), Column("time", "", "of all its units"))
    return Table("actions", "Actions", columns, tuple(rows))


def _replicates(stored: Storage) -> Cell:
    """Coupled pairs per document, and under them the replicates of residual branching."""
    return Cell(count_range(stored.replicates), f"{count_range(stored.branchings)} SWRB" if stored.branchings else "")


def _seconds(stored: Storage) -> float | None:
    known = [value for value in (stored.prefill_seconds, stored.decode_seconds) if value is not None]
    return sum(known) if known else None


def study_rows(facts: Facts, estimates: Estimates, actions: list[str]) -> list[tuple[str, str]]:
    """What was run, as label and text."""
    stored = [facts.storage[action] for action in actions if action in facts.storage]
    controls = [_control(control) for control in facts.controls]
    seconds = [value for row in facts.storage.values() for value in (row.prefill_seconds, row.decode_seconds)]
    known = [value for value in seconds if value is not None]
    laws = [row.kernel_evaluations for row in facts.storage.values() if row.kernel_evaluations is not None]
    cost = duration(sum(known)) if known else "not recorded"
    plan = "none: all estimates are exploratory"
    if facts.plan:
        plan = f"frozen {facts.plan.frozen_at}, SHA-256 {facts.plan.sha256[:12]}…"
    rows = [
        ("Model", facts.model),
        ("Device", "; ".join(facts.devices) or "not recorded"),
        ("Documents", _documents(facts)),
        ("Horizon H", f"{facts.windows.horizon} tokens"),
        ("Replicates K", count_range(value for row in stored for value in row.replicates) + " per document and action"),
        ("Controls", "; ".join(controls) or "none"),
        ("Plan", plan),
        ("Seed", str(facts.seed) if facts.seed is not None else "not recorded"),
        ("Intervals", _intervals(estimates)),
        ("Time", f"{cost} for these documents" + (f", {count(sum(laws))} next-token laws" if laws else "")),
    ]  # fmt: skip
    equal = _equal_bytes(facts, actions)
    if equal:
        rows.insert(5, ("Equal bytes", equal))
    branched = [total for row in stored for total in row.branchings]
    if branched:
        text = f"{count_range(branched)} of residual branching (SWRB) beside them, where it was used"
        rows.insert(5, ("SWRB replicates", text))
    return rows


def _equal_bytes(facts: Facts, actions: list[str]) -> str:
    found = []
    for place, action in enumerate(actions):
        for other in actions[place + 1 :]:
            shared = facts.same_bytes(action, other)
            if shared:
                each = size(facts.storage[action].mean_bytes(3))
                found.append(f"{action} = {other} in every part on all {count(shared)} documents ({each} resident)")
    return "; ".join(found)


def _intervals(estimates: Estimates) -> str:
    kinds: dict[tuple[str, int | None], set[float]] = {}
    for row in estimates.all():
        if row.has_interval and row.level is not None:
            kinds.setdefault((row.standing, row.draws), set()).add(row.level)
    if not kinds:
        return "missing"
    return "; ".join(
        f"{status}: {count(draws)} bootstrap draws, {' and '.join(level(value) for value in sorted(levels))}"
        for (status, draws), levels in sorted(kinds.items(), key=str)
    )


def _documents(facts: Facts) -> str:
    strata = f"{len(facts.strata)} {'strata' if len(facts.strata) > 1 else 'stratum'}"
    text = f"{count(facts.count(EVALUATION))} evaluation, {count(facts.count(DEVELOPMENT))} development, {strata}"
    return f"{text}; {count(facts.unmeasured)} more are listed but not measured" if facts.unmeasured else text


def _control(control: Control) -> str:
    if not control.pairs:
        return f"{control.action}: no pairs yet"
    moved = "exactly 0" if control.zero else "NOT 0"
    return f"{control.action}: δ and f {moved} in {count(control.pairs)} pairs on {count(control.documents)} documents"
