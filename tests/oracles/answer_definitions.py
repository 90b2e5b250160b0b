"""The views of answers, evaluated from the definitions by plain loops over paths and scores that a formula gives."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fixtures.awkward_logs import Row
from oracles.coupled_paths import Analysis, Path, Pool

from kvdrift.schema.moments import ANSWER_MOMENTS

NAMES = ("study", "model", "doc", "action", "replicate")


def score_of(path: Path) -> Row | None:
    """A path's scores: some documents have no answers, and equal continuations score equally."""

    def draw(what: str, many: int) -> int:
        return zlib.crc32(f"{what} {path.study} {path.model} {path.doc} {path.action} {path.replicate}".encode()) % many

    if zlib.crc32(f"{path.study} {path.doc}".encode()) % 3 == 0:
        return None
    score_x = (0.0, 0.5, 1.0, 1.0)[draw("x", 4)]
    score_y = score_x if path.tau is None else (0.0, 0.5, 1.0)[draw("y", 3)]
    first = 1 + draw("first", path.horizon)
    last = first + draw("last", path.horizon - first + 1)
    span = (first, last) if score_x else (None, None)
    return {"scoring": "all", "score_x": score_x, "score_y": score_y, "span_first": span[0], "span_last": span[1],
            "document_revision": 0}  # fmt: skip


def scores(analysis: Analysis) -> list[Row]:
    named = ((path, score_of(path)) for path in analysis.paths_of_all)
    return [
        {name: getattr(path, name) for name in NAMES} | {"action_revision": 0} | score
        for path, score in named
        if score is not None
    ]


def moments_of(path: Path, score: Row) -> dict[str, float]:
    right_x, right_y = score["score_x"] == 1, score["score_y"] == 1
    place = None
    if path.tau is not None and score["span_first"] is not None:
        before, after = path.tau < score["span_first"], path.tau > score["span_last"]
        place = "before" if before else "after" if after else "inside"
    found = {
        "reference_score": score["score_x"],
        "compressed_score": score["score_y"],
        "reference_right": float(right_x),
        "lost": float(right_x and not right_y),
        "gained": float(right_y and not right_x),
    }
    for one in ("before", "inside", "after"):
        found[f"right_{one}"] = float(right_x and place == one)
    for one in ("before", "inside", "after"):
        found[f"lost_from_{one}"] = float(right_x and not right_y and place == one)
    return found


def keys_of(path: Path) -> Row:
    keys = {name: getattr(path, name) for name in NAMES[:4]}
    return keys | {name: path.document[name] for name in ("split", "stratum", "cluster")}


def trajectory_answers(analysis: Analysis) -> list[Row]:
    named = ((path, score_of(path)) for path in analysis.paths)
    return [
        {**keys_of(path), "replicate": path.replicate, **moments_of(path, score)}
        for path, score in named
        if score is not None
    ]


def document_means(paths: Sequence[Path]) -> dict[str, float]:
    each = [moments_of(path, score) for path in paths if (score := score_of(path)) is not None]
    return {name: math.fsum(one[name] for one in each) / len(each) for name in ANSWER_MOMENTS} if each else {}


def document_answers(analysis: Analysis) -> list[Row]:
    return [
        {**keys_of(paths[0]), "replicates": len(paths), **means}
        for paths in analysis.by_document(analysis.paths).values()
        if (means := document_means(paths))
    ]


def pooled_means(analysis: Analysis, pool: Pool, of: Callable[[list[Path]], dict[str, float]]) -> dict[str, Any] | None:
    """Weigh documents with answers equally in a stratum, and strata equally."""
    strata: dict[str, list[dict[str, float]]] = {}
    trajectories = 0
    for paths in analysis.by_document(pool.paths).values():
        if means := of(paths):
            trajectories += len(paths)
            strata.setdefault(paths[0].document["stratum"], []).append(means)
    if not strata:
        return None
    pooled = {
        name: statistics.fmean(statistics.fmean(one[name] for one in own) for own in strata.values())
        for name in next(iter(strata.values()))[0]
    }
    return {"documents": sum(map(len, strata.values())), "trajectories": trajectories, **pooled}


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def answers(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, _ in analysis.pools():
        m = pooled_means(analysis, pool, document_means)
        if m is not None:
            yield {
                **keys,
                "documents": m["documents"],
                "trajectories": m["trajectories"],
                "accuracy_reference": m["reference_score"],
                "accuracy": m["compressed_score"],
                "score_gap": m["compressed_score"] - m["reference_score"],
                "reference_right": m["reference_right"],
                "lost": m["lost"],
                "gained": m["gained"],
                "lost_share": share(m["lost"], m["reference_right"]),
                **{one: share(m[f"right_{one}"], m["reference_right"]) for one in ("before", "inside", "after")},
                **{
                    f"lost_{one}": share(m[f"lost_from_{one}"], m[f"right_{one}"])
                    for one in ("before", "inside", "after")
                },
            }  # fmt: skip


def answer_correlations(analysis: Analysis) -> list[Row]:
    controls = {(row["study"], row["action"]) for row in analysis.log.actions if row["control"]}

    def with_risk(paths: list[Path]) -> dict[str, float]:
        means = document_means(paths)
        risk = [sum(path.mismatch(t) for t in path.at) / path.horizon for path in paths]
        return means and means | {"mismatch": statistics.fmean(risk)}

    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for keys, pool, _ in analysis.pools():
        m = pooled_means(analysis, pool, with_risk)
        if m is not None and (keys["study"], keys["action"]) not in controls:
            place = tuple(keys[name] for name in ("study", "model", "split", "stratum"))
            m["score_gap"] = m["compressed_score"] - m["reference_score"]
            found.setdefault(place, []).append(m)
    return [
        {
            **dict(zip(("study", "model", "split", "stratum"), place, strict=True)),
            "actions": len(each),
            "lost": correlation([m["mismatch"] for m in each], [m["lost"] for m in each]),
            "score_gap": correlation([m["mismatch"] for m in each], [m["score_gap"] for m in each]),
        }
        for place, each in found.items()
    ]


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(first) < 3 or min(statistics.pstdev(first), statistics.pstdev(second)) <= 1e-12:
        return None
    return statistics.correlation(first, second)


ANSWER_EVALUATIONS: dict[str, Callable[[Analysis], Iterable[Row]]] = {
    function.__name__: function
    for function in (scores, trajectory_answers, document_answers, answers, answer_correlations)
}
