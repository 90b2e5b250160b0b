"""Check scores against their units and documents. The scores themselves cannot be checked without the tokenizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from schema.document import SCORINGS
from schema.tables import GROUP_KEY, PLAIN, TABLES
from verification.files import SmallTable, UnitRecord, row_name
from verification.findings import Fault, Verified, number_of

_GROUP = (*GROUP_KEY, "action_revision")
_DOCUMENT = ("study", "model", "doc", "document_revision")
_Ranges = Mapping[tuple[Any, ...], list[tuple[int, int, int]]]  # first replicate, one past the last, horizon


def check_scores(table: SmallTable, records: Mapping[int, UnitRecord], documents: pa.Table) -> Verified:
    """Check that every score belongs to a stored coupled pair of a document with answers, and is within its range."""
    ranges = defaultdict[tuple[Any, ...], list[tuple[int, int, int]]](list)
    for record in records.values():
        if record["estimator"] == PLAIN:
            first = record["first_replicate"]
            ranges[tuple(record[name] for name in _GROUP)].append(
                (first, first + record["replicates"], record["horizon"])
            )
    answered = {
        tuple(row[name] for name in _DOCUMENT)
        for row in documents.select([*_DOCUMENT, "answers"]).to_pylist()
        if row["answers"]
    }
    faults = list(table.check.faults)
    for row in table.rows.to_pylist():
        wrong = list(_wrong(row, ranges))
        if tuple(row[name] for name in _DOCUMENT) not in answered:
            wrong.append("answers of its document are not there, must be")
        name = row_name("scores", {key: row[key] for key in TABLES["scores"].key})
        faults += [Fault(name, what) for what in wrong]
    return Verified(
        "scores", number_of(table.rows.num_rows, "row"), "of pairs and answers that are stored", tuple(faults)
    )


def _wrong(row: Mapping[str, Any], ranges: _Ranges) -> Iterator[str]:
    own = ranges.get(tuple(row[name] for name in _GROUP), ())
    horizon = next((h for first, end, h in own if first <= row["replicate"] < end), None)
    if horizon is None:
        yield "its pair is in no unit, must be"
    if row["scoring"] not in SCORINGS:
        yield f"scoring is '{row['scoring']}', must be {' or '.join(SCORINGS)}"
    for name in ("score_x", "score_y"):
        if not 0 <= row[name] <= 1:
            yield f"{name} is {row[name]}, must be within 0..1"
    first, last = row["span_first"], row["span_last"]
    if (row["score_x"] > 0) != (first is not None) or (first is None) != (last is None):
        yield f"the answer span is {first}..{last}, must be there where score_x is above 0, and nowhere else"
    elif first is not None and not 1 <= first <= last <= (horizon or last):
        yield f"the answer span is {first}..{last}, must be within 1..{horizon}"
