"""The views of answers' records, evaluated by plain loops over prompts that a formula gives."""

from __future__ import annotations

import re
import statistics
import zlib
from collections.abc import Iterator
from typing import Any

from fixtures.awkward_logs import Row
from oracles.answer_definitions import score_of
from oracles.coupled_paths import Analysis, Path

ENTRIES, LAYERS, HEADS = 6, 3, 2
POOLED = "pooled"


def draw(what: str, many: int) -> int:
    return zlib.crc32(what.encode()) % many


def records_of(row: Row) -> list[Row]:
    """Answer 0 has two pieces, the second at two places; answer 1 has one, in some documents none."""
    found = [(0, 0, 1, 2), (0, 1, 3, 3), (0, 1, 5, 6)]
    found += [(1, 0, 4, 4)] * (draw(f"second {row['doc']}", 3) > 0)
    return [dict(zip(("answer", "piece", "first", "last"), one, strict=True)) for one in found]


def prompts(analysis: Analysis) -> Iterator[Row]:
    """Nothing is stored of every fourth document; some actions have entries counted after two steps."""
    for document in analysis.log.documents:
        names = {name: document[name] for name in ("study", "model", "doc")}
        if draw(f"stored {document['doc']}", 4) == 0:
            continue
        shared = {"document_revision": 0, "action_revision": 0}
        own = {"action": None, "step": 0, "tokens": list(range(ENTRIES)), "records": records_of(document)}
        own["turns"] = [{"role": "user", "first": 1}] if draw(f"turns {document['doc']}", 2) else None
        yield names | shared | own | dict.fromkeys(("layers", "pairs", "kept"))
        for action in {row["action"] for row in analysis.log.actions if row["study"] == document["study"]}:
            groups = 1 + draw(f"groups {action}", LAYERS)
            for step in (0, 3) if draw(f"steps {action}", 2) else (0,):
                pairs = LAYERS * HEADS * (1 + step)
                least = pairs // LAYERS  # of a group: no count is above it, whatever the group
                kept = [
                    draw(f"{document['doc']} {action} {step} {at}", 3) * least // 2 for at in range(groups * ENTRIES)
                ]
                counted = {
                    "action": action,
                    "step": step,
                    "tokens": None,
                    "records": None,
                    "turns": None,
                    "layers": LAYERS,
                }
                yield names | shared | counted | {"pairs": pairs, "kept": kept}


def kept_of(analysis: Analysis) -> dict[tuple[Any, ...], list[float]]:
    """The share that keeps each piece of each answer, by study, model, doc, action and answer."""
    rows = [*prompts(analysis)]
    own = {(row["study"], row["model"], row["doc"]): row for row in rows if row["action"] is None}
    last: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["action"] is not None:
            key = (row["study"], row["model"], row["doc"], row["action"])
            if key not in last or last[key]["step"] < row["step"]:
                last[key] = row
    found: dict[tuple[Any, ...], list[float]] = {}
    for key, row in last.items():
        pieces: dict[tuple[int, int], float] = {}
        for place in own[key[:3]]["records"]:
            positions = range(place["first"], place["last"] + 1)
            share = statistics.fmean(sum(row["kept"][p - 1 :: ENTRIES]) / row["pairs"] for p in positions)
            piece = (place["answer"], place["piece"])
            pieces[piece] = max(pieces.get(piece, 0.0), share)
        for (answer, _), share in pieces.items():
            found.setdefault((*key, answer), []).append(share)
    return found


def answer_records(analysis: Analysis) -> Iterator[Row]:
    documents = {(row["study"], row["model"], row["doc"]): row for row in analysis.log.documents}
    for (study, model, doc, action, answer), shares in kept_of(analysis).items():
        document = documents[study, model, doc]
        places = sum(record["answer"] == answer for record in records_of(document))
        names = {"study": study, "model": model, "doc": doc, "action": action, "answer": answer}
        of_all = {"pieces": len(shares), "places": places, "kept": min(shares), "kept_mean": statistics.fmean(shares)}
        yield names | {name: document[name] for name in ("split", "stratum")} | of_all


def text_of(analysis: Analysis, path: Path, side: str) -> str:
    texts = {row["token"]: row["text"] for row in analysis.log.tokens
             if (row["study"], row["model"]) == (path.study, path.model)}  # fmt: skip
    end = path.eos(side) or path.horizon + 1
    said = "".join(texts.get(path.at[t][f"{side}_token"], "") for t in range(1, end))
    return compared(path, said)


def compared(path: Path, text: str) -> str:
    """Return a text without what its scoring ignores; the texts of these logs have "a" as an article alone."""
    if path.document["scoring"] == "normalized":
        text = re.sub(r"\bthe\b|a|[.']", "", text)
    return "".join(text.lower().split())


def losses(analysis: Analysis) -> Iterator[tuple[Path, int]]:
    for path in analysis.paths:
        score = score_of(path)
        if score is None or score["score_x"] == 0 or score["score_y"] == 1:
            continue
        said = {side: text_of(analysis, path, side) for side in "xy"}
        for number, answer in enumerate(path.document["answers"]):
            wanted = compared(path, answer)
            if wanted in said["x"] and wanted not in said["y"]:
                yield path, number


def lost_answers(analysis: Analysis) -> Iterator[Row]:
    kept = kept_of(analysis)
    for path, answer in losses(analysis):
        shares = kept.get((path.study, path.model, path.doc, path.action, answer))
        names = {name: getattr(path, name) for name in ("study", "model", "doc", "action", "replicate")}
        place = {name: path.document[name] for name in ("split", "stratum")}
        yield names | place | {"answer": answer, "kept": None if shares is None else min(shares)}


def fate(kept: float) -> str:
    return "gone" if kept == 0 else "partly" if kept < 1 else "whole"


def lost_records(analysis: Analysis) -> Iterator[Row]:
    pools: dict[tuple[Any, ...], dict[str, list[str]]] = {}

    def count(row: Row, what: str) -> None:
        for stratum in (row["stratum"], POOLED):
            key = (row["study"], row["model"], row["split"], stratum, row["action"])
            pools.setdefault(key, {"all": [], "lost": []})[what].append(fate(row["kept"]))

    for row in answer_records(analysis):
        count(row, "all")
    for row in lost_answers(analysis):
        if row["kept"] is not None:
            count(row, "lost")
    for (study, model, split, stratum, action), fates in pools.items():
        row = {"study": study, "model": model, "split": split, "stratum": stratum, "action": action}
        row |= {"answers": len(fates["all"]), "lost": len(fates["lost"])}
        for name in ("gone", "partly", "whole"):
            row[name] = fates["all"].count(name) / len(fates["all"])
            row[f"lost_{name}"] = fates["lost"].count(name) / len(fates["lost"]) if fates["lost"] else None
        yield row


RECORD_EVALUATIONS = {function.__name__: function for function in (prompts, answer_records, lost_answers, lost_records)}
