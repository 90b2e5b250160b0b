"""The view of verdicts, evaluated from the evaluations of other views by plain loops over pairs of actions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from fixtures.awkward_logs import Row
from oracles.coupled_paths import Analysis
from oracles.summary_definitions import document_bytes, summary
from oracles.view_definitions import controls, estimates, sequence, under_newest_plan

_PLANNED = ("prespecified", "seen")
_VALUES = ("estimate", "low", "high", "level", "documents")


def verdict(analysis: Analysis) -> Iterator[Row]:
    rows = list(summary(analysis))
    for study, model in sorted({(row["study"], row["model"]) for row in rows}):
        own = [row for row in rows if (row["study"], row["model"]) == (study, model)]
        yield from _Study(analysis, study, model, own).rows()


class _Study:
    def __init__(self, analysis: Analysis, study: str, model: str, rows: list[Row]) -> None:
        self.analysis, self.names = analysis, {"study": study, "model": model}
        declared = {row["action"]: row for row in analysis.log.actions if row["study"] == study}
        kept = [row for row in rows if row["action"] in declared and not declared[row["action"]]["control"]]
        self.floors = [row["action"] for row in kept if declared[row["action"]]["selector"] == "numerics"]
        self.candidates = [row for row in kept if row["action"] not in self.floors]
        self.weights = {name: row.get("weights") for name, row in declared.items()}
        self.kept = kept
        evaluated = {row["doc"]: row["stratum"] for row in analysis.log.documents
                     if self.names.items() <= row.items() and row["split"] == "evaluation"}  # fmt: skip
        self.strata = evaluated
        self.bytes = [row for row in document_bytes(analysis) if self.names.items() <= row.items()]
        pooled = self.names | {"split": "evaluation", "stratum": "pooled", "x": None}
        self.estimates = [row for row in estimates(analysis) if pooled.items() <= row.items()]

    def held(self, action: str) -> dict[str, int | None]:
        return {
            row["doc"]: row["cache_bytes"]
            for row in self.bytes
            if row["action"] == action and row["doc"] in self.strata
        }

    def weight(self, action: str) -> int | None:
        return max(
            (row["weight_bytes"] for row in self.bytes if row["action"] == action and row["weight_bytes"]), default=None
        )

    def ratio(self, action: str, other: str) -> float | None:
        mine, theirs = self.held(action), self.held(other)
        shared = sorted(mine.keys() & theirs.keys())
        known = [(mine[doc], theirs[doc]) for doc in shared]
        if not known or any(None in pair for pair in known) or not sum(pair[1] or 0 for pair in known):
            return None
        ratio = sum(pair[0] or 0 for pair in known) / sum(pair[1] or 0 for pair in known)
        return 1.0 if abs(ratio - 1) < 0.005 else ratio

    def gap(self, quantity: str, action: str, other: str, *, turned: bool = False) -> Row | None:
        for row in self.estimates:
            if (row["quantity"], row["action"], row["baseline"]) == (quantity, action, other):
                planned = row["family"] is not None and row["status"] in _PLANNED
                value = {name: row[name] for name in _VALUES} | {"status": row["status"] if planned else "exploratory"}
                if turned:
                    minus = {name: None if row[name] is None else -row[name] for name in ("estimate", "low", "high")}
                    value |= {"estimate": minus["estimate"], "low": minus["high"], "high": minus["low"]}
                return value
        return None

    def difference(self, action: str, other: str) -> Row:
        order = [*_PLANNED, "exploratory"]
        both = [self.gap("gap", action, other), self.gap("gap", other, action, turned=True)]
        single = min(
            (row for row in both if row), key=lambda row: (row["low"] is None, order.index(row["status"])), default=None
        )
        together = self.gap("gap_simultaneous", action, other)
        nothing = dict.fromkeys(_VALUES) | {"status": "exploratory"}
        names = [row["action"] for row in self.kept]
        pairs = [
            pair
            for a in names
            for b in names
            if a != b and (pair := self.gap("gap_simultaneous", a, b)) and pair["low"] is not None
        ]
        if len(pairs) <= 2 or together is None or together["low"] is None:
            return single or nothing
        if single is None or single["status"] not in _PLANNED:
            return together
        return single if excludes(together) and not excludes(single) else together | {"status": single["status"]}

    def obstructed(self, differences: dict[tuple[str, str], Row]) -> bool:
        names = [row["action"] for row in self.candidates]
        moved = any(row["moved_pairs"] for row in controls(self.analysis) if self.names.items() <= row.items())
        stale = any(row["status"] in {None, "outdated"} for row in self.kept)
        unknown = any(self.weights[a] == self.weights[b] and self.ratio(a, b) is None for a, b in differences)
        return len(names) < 2 or moved or stale or unknown or self.unfinished()

    def unfinished(self) -> bool:
        plans = under_newest_plan(
            self.analysis, [row for row in self.analysis.log.plans if self.names.items() <= row.items()]
        )
        for content in (json.loads(row["plan"]) for row in plans):
            if content.get("sequential"):
                looks = [row for row in sequence(self.analysis) if self.names.items() <= row.items()]
                last = max((row["look"] for row in looks), default=0)
                resolved = bool(looks) and all(row["resolved"] for row in looks if row["look"] == last)
                if last < len(content["sequential"]["looks"]) and not resolved:
                    return True
                continue
            count = content.get("documents_per_stratum")
            for stratum in content.get("strata", ()) if count else ():
                frozen = content.get("documents", {}).get("evaluation", {}).get(stratum, ())
                forgotten = content.get("forgotten", {}).get("evaluation", {}).get(stratum, 0)
                wanted = count - min(forgotten, max(0, count - len(frozen)))
                for action in {row["action"] for row in self.kept} & set(content.get("actions", ())):
                    docs = {row["doc"] for row in self.bytes if row["action"] == action}
                    if sum(self.strata.get(doc) == stratum for doc in docs) < wanted:
                        return True
        return False

    def rows(self) -> Iterator[Row]:
        names = [row["action"] for row in self.candidates]
        differences = {(a, b): self.difference(a, b) for a in names for b in names if a != b}
        stopped = self.obstructed(differences)
        risk = {row["action"]: row["mismatch"] for row in self.candidates}
        out: dict[str, str] = {}
        for a in names if not stopped else ():
            better = [b for b in names if a != b and (differences[a, b]["low"] or 0) > 0 and (self.ratio(a, b) or 0) >= 1
                      and self.no_more_weights(b, a)]  # fmt: skip
            if better:
                out[a] = min(better, key=lambda name: risk[name])
        left = [a for a in names if a not in out and not stopped]
        undecided = {(a, b) for a in left for b in left if a != b and not excludes(differences[a, b])}
        lost = {row["action"]: row for row in self.estimates if row["quantity"] == "lost_share" and row["baseline"] is None
                and (row["low"] or 0) > 0.5}  # fmt: skip
        badges = {a: self.badge(a, out, undecided, lost, stopped=stopped) for a in names}
        settled = [a for a in left if badges[a] in {"recommended", "loses answers"}]
        for a in names:
            reasons = [("ruled out by", out[a])] if a in out else []
            reasons += [("rules out", b) for b in names if out.get(b) == a]
            reasons += [("undecided against", b) for b in names if (a, b) in undecided]
            reasons += [("differs from", b) for b in settled if a in settled and a != b]
            made = [
                {"says": says, "other": b, **differences[a, b], "bytes_ratio": self.ratio(a, b)} for says, b in reasons
            ]
            for floor in self.floors:
                near = self.gap("gap_simultaneous", a, floor) or dict.fromkeys(_VALUES) | {"status": "exploratory"}
                if (near["low"] or 0) <= 0:
                    made.append(
                        {
                            "says": "not distinguished from",
                            "other": floor,
                            **near,
                            "status": "exploratory",
                            "bytes_ratio": None,
                        }
                    )
            if badges[a] == "loses answers":
                planned = lost[a]["family"] is not None and lost[a]["status"] in _PLANNED
                values = {name: lost[a][name] for name in _VALUES} | {
                    "status": lost[a]["status"] if planned else "exploratory"
                }
                made.append({"says": "loses answers", "other": None, **values, "bytes_ratio": None})
            nothing = dict.fromkeys(("says", "other", *_VALUES, "status", "bytes_ratio"))
            for row in made or [nothing]:
                yield {**self.names, "action": a, "badge": badges[a], **row, "documents_needed": needed(row)}

    def no_more_weights(self, action: str, other: str) -> bool:
        mine, theirs = self.weight(action), self.weight(other)
        return self.weights[action] == self.weights[other] or (
            mine is not None and theirs is not None and mine <= theirs
        )

    def badge(
        self, action: str, out: dict[str, str], undecided: set[tuple[str, str]], lost: dict[str, Row], *, stopped: bool
    ) -> str:
        if self.weights[action] is not None and self.weight(action) is None:
            return "other weights"
        if stopped or any(action in pair for pair in undecided):
            return "undecided"
        if action in out:
            return "ruled out"
        return "loses answers" if action in lost else "recommended"


def excludes(row: Row) -> bool:
    return row["low"] is not None and (row["low"] > 0 or row["high"] < 0)


def needed(row: Row) -> Any:
    if row["says"] != "undecided against" or not row["estimate"] or row["low"] is None:
        return None
    times = ((row["high"] - row["low"]) / 2 / abs(row["estimate"])) ** 2
    return None if times > 25 else math.ceil(max(times, 1.1) * row["documents"])
