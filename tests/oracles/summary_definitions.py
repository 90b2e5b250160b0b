"""The views that people query first, evaluated from units, paths and stored rows by plain loops."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fixtures.awkward_logs import Row
from oracles.answer_definitions import answers
from oracles.coupled_paths import Analysis, Pool, WindowRanges
from oracles.view_definitions import decomposition, estimates, published

PAIR = ("study", "model", "doc", "action", "replicate")


def stored_bytes(analysis: Analysis, names: Row) -> int | None:
    """Return the largest bytes that a unit of a document and action states."""
    parts = ("payload_bytes", "index_bytes", "metadata_bytes")
    units = [unit for unit in analysis.log.units if names.items() <= unit.items()]
    whole = [unit for unit in units if all(unit[part] is not None for part in parts)]
    known = [sum(unit[part] for part in parts) + (unit["scale_bytes"] or 0) for unit in whole]
    return max(known, default=None)


def full_bytes(analysis: Analysis, names: Row) -> int | None:
    """Return the largest bytes that a control of the same document states."""
    controls = [row["action"] for row in analysis.log.actions if row["study"] == names["study"] and row["control"]]
    known = [stored_bytes(analysis, names | {"action": action}) for action in controls]
    return max((one for one in known if one is not None), default=None)


def weight_bytes(analysis: Analysis, names: Row) -> int | None:
    """Return the largest bytes that a unit states for the weight files of its side."""
    units = [unit for unit in analysis.log.units if names.items() <= unit.items()]
    return max((unit["weight_bytes"] for unit in units if unit["weight_bytes"] is not None), default=None)


def fixed_bytes(analysis: Analysis, names: Row) -> int | None:
    """Return the largest bytes that a unit states for what no action can evict."""
    units = [unit for unit in analysis.log.units if names.items() <= unit.items()]
    return max((unit["fixed_bytes"] for unit in units if unit["fixed_bytes"] is not None), default=None)


def document_bytes(analysis: Analysis) -> list[Row]:
    keys = {tuple(unit[name] for name in ("study", "model", "doc", "action")) for unit in analysis.log.units}
    named = [dict(zip(("study", "model", "doc", "action"), key, strict=True)) for key in keys]
    return [
        {
            **one,
            "cache_bytes": stored_bytes(analysis, one),
            "full_cache_bytes": full_bytes(analysis, one),
            "weight_bytes": weight_bytes(analysis, one),
            "fixed_bytes": fixed_bytes(analysis, one),
        }
        for one in named
    ]


def pooled_bytes(pool: Pool, of: Callable[[str], int | None]) -> float | None:
    """Return the pooled bytes: documents and then strata with equal weight; None if a document does not say."""
    strata: dict[str, list[int | None]] = {}
    for doc, paths in pool.members.items():
        strata.setdefault(paths[0].document["stratum"], []).append(of(doc))
    values = [[one for one in stratum if one is not None] for stratum in strata.values()]
    if sum(map(len, values)) < len(pool.docs):
        return None
    return statistics.fmean(statistics.fmean(stratum) for stratum in values)


def frontier(analysis: Analysis) -> Iterator[Row]:
    scored = {place(row): row for row in answers(analysis)}
    measured = {place(row): row for row in decomposition(analysis)}
    for keys, pool, _ in analysis.pools():
        names = {name: keys[name] for name in ("study", "model", "action")}
        held, whole, fixed = (
            pooled_bytes(pool, lambda doc, of=of, names=names: of(analysis, names | {"doc": doc}))
            for of in (stored_bytes, full_bytes, fixed_bytes)
        )
        risk = measured[place(keys)]
        yield {
            **keys,
            **{name: risk[name] for name in ("documents", "trajectories", "mismatch", "exposure", "mean_entry",
                                             "divergence_probability")},
            "cache_bytes": held,
            "cache_share": None if held is None or whole is None else held / whole,
            "fixed_bytes": fixed,
            "accuracy": scored[place(keys)]["accuracy"] if place(keys) in scored else None,
            "weight_bytes": max((size for doc in pool.members
                                 if (size := weight_bytes(analysis, names | {"doc": doc})) is not None), default=None),
        }  # fmt: skip


def place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("study", "model", "split", "stratum", "action"))


def of_pooled_evaluation(rows: Iterable[Row]) -> dict[tuple[str, ...], Row]:
    kept = [row for row in rows if (row["split"], row["stratum"]) == ("evaluation", "pooled")]
    return {(row["study"], row["model"], row["action"]): row for row in kept}


def summary(analysis: Analysis) -> Iterator[Row]:
    costs, risks = (of_pooled_evaluation(view(analysis)) for view in (frontier, decomposition))
    scored = of_pooled_evaluation(answers(analysis))
    scalar = {"quantity": "mismatch", "baseline": None, "x": None}
    stored = of_pooled_evaluation(row for row in estimates(analysis) if scalar.items() <= row.items())
    for key, cost in costs.items():
        names = dict(zip(("study", "model", "action"), key, strict=True))
        declared = [row["control"] for row in analysis.log.actions if (row["study"], row["action"]) == key[::2]]
        estimate = stored.get(key)
        stands = (
            estimate is not None
            and estimate["documents"] == cost["documents"]
            and abs(estimate["estimate"] - cost["mismatch"]) < 1e-9
        )
        shown = estimate if estimate is not None and stands else dict.fromkeys(("low", "high", "level"))
        yield {
            **names,
            **{name: cost[name] for name in ("cache_share", "cache_bytes", "mismatch", "exposure", "mean_entry",
                                             "accuracy", "documents")},
            "control": declared[0] if declared else None,
            "mismatch_low": shown["low"],
            "mismatch_high": shown["high"],
            "level": shown["level"],
            "status": None if estimate is None else estimate["status"] if stands else "outdated",
            "divergence_probability": risks[key]["divergence_probability"],
            **{name: risks[key][name] for name in ("written", "mismatch_written", "exposure_written")},
            "accuracy_reference": scored[key]["accuracy_reference"] if key in scored else None,
            "replicates": risks[key]["trajectories"] / risks[key]["documents"],
            "horizon": analysis.windows[key[0], key[1]].horizon,
        }  # fmt: skip


def trajectory_text(analysis: Analysis) -> list[Row]:
    texts = {(row["study"], row["model"], row["token"]): row["text"] for row in analysis.log.tokens}
    pairs: dict[tuple[Any, ...], list[Row]] = {}
    for event in analysis.log.events:
        if event["kind"] == "coupled":
            pairs.setdefault(tuple(event[name] for name in PAIR), []).append(event)
    return [
        dict(zip(PAIR, key, strict=True)) | {f"{side}_text": said(events, side, texts) for side in "xy"}
        for key, events in pairs.items()
    ]


def said(events: list[Row], side: str, texts: dict[tuple[Any, ...], str]) -> str | None:
    """Return the text of one side before its EOS; None if a token has no text."""
    own = [event for event in sorted(events, key=lambda event: int(event["t"])) if not event[f"{side}_eos"]]
    found = [texts.get((event["study"], event["model"], event[f"{side}_token"])) for event in own]
    return None if None in found else "".join(text for text in found if text is not None)


PAPERS_WINDOWS = WindowRanges(
    horizon=128, cohort_bound=64, early=range(1, 17), late=range(49, 65),
    blocks=(range(1, 33), range(33, 65), range(65, 129)), run=16, threshold=0.99,
)  # fmt: skip
BLOCKS = {f"{block.start}-{block.stop - 1}": number for number, block in enumerate(PAPERS_WINDOWS.blocks, 1)}

# What the paper's quantities are called in estimates, where they have a name there.
OUR_NAMES = {name: name for name in (
    "exposure_term", "rate_term", "occurrence_term", "exposure_share", "eos_share", "rollout_tv_gap",
    "fixed_history_gap", "flat_extrapolation_gap", "full_minus_fixed_history", "full_minus_flat_extrapolation",
)} | {
    "divergence_cdf": "entry_cdf", "mean_entry_given_divergence": "mean_entry", "token_mismatch_gap": "gap",
    "branch_cohort_fraction": "cohort_fraction", "branch_tv": "branch_delta", "early_branch_tv": "early",
    "late_branch_tv": "late", "late_minus_early_branch_tv": "late_minus_early",
    "late_minus_early_pre_eos_branch_tv": "late_minus_early_pre_eos", "saturation_99": "saturation",
    "sixteen_consecutive_pre_eos_agreements": "long_agreement", "generation_clock_tv_gap": "generation_gap",
    "generation_clock_gap_change": "generation_gap_change", "history_gap_difference": "history_gap",
    "history_gap_difference_pre_eos": "pre_eos",
}  # fmt: skip
COMPARED = ("study", "model", "stratum", "action", "baseline", "quantity", "x")


def published_comparison(analysis: Analysis) -> list[Row]:
    generated = {tuple(unit[name] for name in ("study", "model", "action")) for unit in analysis.log.units}
    own = {tuple(row[name] for name in COMPARED): row for row in estimates(analysis) if row["split"] == "evaluation"}
    rows: dict[tuple[Any, ...], Row] = {}
    studies = [key for key, windows in analysis.windows.items() if windows == PAPERS_WINDOWS]
    # The last one stands: numbers with an interval, and then those of the text.
    for printed in sorted(published(analysis), key=lambda row: (row["low"] is not None, row["source"])):
        quantity = OUR_NAMES.get(printed["quantity"].removesuffix("_figure"))
        for study, model in studies if quantity else []:
            if model.rstrip("/").split("/")[-1].lower() != (printed["model"] or "").lower():
                continue
            actions = [printed[name] for name in ("action", "baseline") if printed[name] is not None]
            if not all((study, model, action) in generated for action in actions):
                continue
            x = BLOCKS.get(printed["x"]) or (printed["x"] and int(printed["x"]))
            places = [
                (quantity, x),
                *([("divergence_probability", None)] if (quantity, x) == ("entry_cdf", 128) else []),
            ]
            for name, at in places:
                key = (study, model, printed["stratum"], printed["action"], printed["baseline"], name, at)
                rows[key] = dict(zip(COMPARED, key, strict=True)) | beside_own(printed, own.get(key, {}))
    return list(rows.values())


def beside_own(printed: Row, estimate: Row) -> Row:
    """The columns of one comparison that are no names: a printed number as a fraction or in tokens, and an estimate."""
    tokens = printed["unit"] == "steps"
    assert tokens or printed["unit"] in {"%", "pp"}
    ends = {"published": printed["value"], "published_low": printed["low"], "published_high": printed["high"]}
    return {
        **{name: value if tokens or value is None else value / 100 for name, value in ends.items()},
        **{name: estimate.get(name) for name in ("estimate", "low", "high", "level", "documents", "status")},
        "unit": "tokens" if tokens else "fraction",
        "published_level": printed["level"],
        "published_study": printed["study"],
        "source": printed["source"],
    }


SUMMARY_EVALUATIONS: dict[str, Callable[[Analysis], Iterable[Row]]] = {
    function.__name__: function
    for function in (document_bytes, frontier, summary, trajectory_text, published_comparison)
}
