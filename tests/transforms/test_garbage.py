"""Generated garbage through the Beam transforms: each event is in a replicate or in a dead letter, as a plain twin says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.beam_results import HORIZON, assert_equals_batch_path, events, letters, ran
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.schema.tables import PAIR_COLUMNS
from kvdrift.transforms import DeriveTrajectories
from kvdrift.transforms.streams.assembly import cut_all, events_of

TEXTS = ("study", "model", "doc", "action")
WHOLE = ("replicate", "t", "x_token", "y_token")
LATER = ("kind", "unit", "action_revision")
COLUMNS_OF_EVENTS = (*PAIR_COLUMNS, *LATER)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 0.0, 1.0, Decimal(1), np.int8(1), np.float32(0), 1.0000001, -1e-8, 2.5]),
    st.integers(-2, 14), st.integers(), st.floats(), st.floats(-2, 14), st.integers(-2, 14).map(float),
    st.decimals(allow_nan=True, allow_infinity=True), st.integers(-2, 14).map(Decimal), st.integers(-2, 14).map(np.int64),
    st.floats(0, 2).map(np.float32), st.booleans(), st.booleans().map(np.bool_),
)  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=4), st.binary(max_size=4), st.just("\ud800")),
    lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(st.text(max_size=3), inside, max_size=3)),
    max_leaves=4,
)
GOOD = {
    "study": "s", "model": "m", "doc": "d", "action": "a", "replicate": 0, "t": 1, "x_token": 3, "y_token": 4,
    "delta": 0.5, "f": 0.25, "x_eos": False, "y_eos": False,
}  # fmt: skip


@st.composite
def damaged(draw: Any) -> dict[str, Any]:
    """An event of which some values are anything, and some columns are missing."""
    event = GOOD | {"replicate": draw(st.integers(0, 3)), "t": draw(st.integers(1, HORIZON))}
    for name in draw(st.lists(st.sampled_from(COLUMNS_OF_EVENTS), max_size=2)):
        event[name] = draw(st.one_of(NUMBERS, ANYTHING))
    for name in draw(st.lists(st.sampled_from(list(GOOD)), max_size=1)):
        event.pop(name, None)
    return event


def is_number(value: Any) -> bool:
    numbers = isinstance(value, int | float | Decimal | np.number) and not isinstance(value, bool | np.bool_)
    return numbers and not (isinstance(value, Decimal) and value.is_nan())


def is_whole(value: Any, low: int, high: int) -> bool:
    return is_number(value) and low <= value <= high and value == int(value)


def is_right(name: str, value: Any) -> bool:
    """Tell whether a value belongs into a column."""
    if name in {*TEXTS, "kind"}:
        return isinstance(value, str) and "\ud800" not in value and (name != "kind" or value == "coupled")
    if name in {"delta", "f"}:
        return is_number(value) and -1e-6 <= value <= 1 + 1e-6
    if name in {"x_eos", "y_eos"}:
        return isinstance(value, bool | np.bool_) or is_whole(value, 0, 1)
    bounds = {
        "t": (1, HORIZON), "replicate": (0, 2**31 - 1), "action_revision": (0, 2**31 - 1), "unit": (0, 2**63 - 1),
    }  # fmt: skip
    return is_whole(value, *bounds.get(name, (-(2**31), 2**31 - 1)))


def plainly(event: Any) -> tuple[Any, ...] | None:
    """The values of an event in the order of its columns; None if it is none."""
    if not isinstance(event, dict) or any(event.get(name) is None for name in PAIR_COLUMNS):
        return None
    if not all(is_right(name, event[name]) for name in COLUMNS_OF_EVENTS if event.get(name) is not None):
        return None
    into = dict.fromkeys(TEXTS, str) | dict.fromkeys(WHOLE, int) | dict.fromkeys(("x_eos", "y_eos"), bool)
    return tuple(into.get(name, rounded)(event[name]) for name in PAIR_COLUMNS)


def rounded(distance: Any) -> float:
    return float(np.float32(min(max(float(distance), 0.0), 1.0)))


def values_of(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    yield from zip(*(table[name].to_pylist() for name in PAIR_COLUMNS), strict=True)


@pytest.mark.parametrize("examples", [50, pytest.param(3000, marks=pytest.mark.slow)])
def test_single_elements(examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.one_of(damaged(), damaged(), damaged(), ANYTHING), max_size=12))
    def check(elements: list[Any]) -> None:
        pieces = [*cut_all(elements, HORIZON)]
        found = [row for piece in pieces if not piece.reason for row in values_of(events_of(piece))]
        right = [plainly(element) for element in elements]
        assert Counter(found) == Counter(row for row in right if row)
        refused = [events_of(piece) for piece in pieces if piece.reason]
        assert sum(table.num_rows for table in refused) == right.count(None)
        words = "".join(str(table.to_pylist()) for table in refused)
        for element, row in zip(elements, right, strict=True):
            if row is None and not isinstance(element, dict):
                assert str([repr(element)])[2:-2].encode(errors="backslashreplace").decode() in words

    check()


COLUMNS: dict[str, list[tuple[pa.DataType, st.SearchStrategy[Any]]]] = {
    "number": [
        (pa.int8(), st.integers(-2, 14)), (pa.int64(), st.one_of(st.integers(-2, 14), st.integers(-(2**63), 2**63 - 1))),
        (pa.uint64(), st.one_of(st.integers(0, 14), st.integers(0, 2**64 - 1))), (pa.float64(), st.floats()),
        (pa.float64(), st.integers(-2, 14).map(float)), (pa.float32(), st.floats(0, 4, width=32)),
        (pa.float16(), st.sampled_from([0.0, 1.0, 2.5, 3.0])), (pa.decimal128(20, 2), st.sampled_from([Decimal(1), Decimal("2.50"), Decimal(3)])),
        (pa.decimal256(70, 0), st.integers(-(10**60), 10**60).map(Decimal)), (pa.bool_(), st.booleans()), (pa.null(), st.none()),
        (pa.string(), st.sampled_from(["1", "x"])), (pa.timestamp("us"), st.just(None)), (pa.list_(pa.int32()), st.lists(st.integers(0, 3), max_size=2)),
        (pa.dictionary(pa.int8(), pa.int64()), st.integers(-2, 14)), (pa.run_end_encoded(pa.int32(), pa.int32()), st.integers(0, 4)),
    ],
    "text": [
        (pa.string(), st.sampled_from(["s", "m", "ü", ""])), (pa.large_string(), st.sampled_from(["s", "m"])),
        (pa.string_view(), st.sampled_from(["s", "a name of more than twelve bytes"])), (pa.binary(), st.binary(max_size=3)),
        (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["s", "m"])), (pa.int32(), st.integers(0, 3)), (pa.null(), st.none()),
        (pa.run_end_encoded(pa.int32(), pa.string()), st.sampled_from(["s", "m"])),
    ],
}  # fmt: skip


@st.composite
def tables(draw: Any) -> pa.Table:
    """A table of events of which some columns have other types, values or nulls."""
    rows = draw(st.integers(1, 8))
    columns = {name: pa.array([value] * rows) for name, value in GOOD.items()}
    columns["t"] = pa.array(draw(st.lists(st.integers(1, HORIZON), min_size=rows, max_size=rows)), pa.int32())
    for name in draw(st.lists(st.sampled_from(COLUMNS_OF_EVENTS), max_size=3)):
        kind, values = draw(st.sampled_from(COLUMNS["text" if name in {*TEXTS, "kind"} else "number"]))
        drawn = draw(st.lists(st.one_of(values, values, st.none()), min_size=rows, max_size=rows))
        if pa.types.is_run_end_encoded(kind):
            columns[name] = pc.run_end_encode(pa.array(drawn, kind.value_type), kind.run_end_type)
        elif pa.types.is_dictionary(kind):
            columns[name] = pa.array(drawn, kind.value_type).dictionary_encode().cast(kind)
        else:
            columns[name] = pa.array(drawn, kind)
    return pa.table(columns)


@pytest.mark.parametrize("examples", [50, pytest.param(3000, marks=pytest.mark.slow)])
def test_batches(examples: int) -> None:
    """Right rows of a batch are taken, whatever the other rows hold, and no value is cast with loss."""

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(tables())
    def check(table: pa.Table) -> None:
        rows = table.to_pylist()
        right = [plainly(row | {"kind": "no text"} if row.get("kind", "") is None else row) for row in rows]
        pieces = [*cut_all([table], HORIZON)]
        found = [row for piece in pieces if not piece.reason for row in values_of(events_of(piece))]
        assert Counter(found) == Counter(row for row in right if row)
        refused = [row for piece in pieces if piece.reason for row in events_of(piece).to_pylist()]
        assert Counter(map(repr, refused)) == Counter(
            repr(row) for row, value in zip(rows, right, strict=True) if value is None
        )

    check()


def test_a_text_that_is_no_utf_8_takes_no_other_row_with_it() -> None:
    table = events(9)
    names = pa.array([b"d\xff" if row == 70 else b"d" for row in range(table.num_rows)])
    table = table.set_column(2, "doc", names.cast(pa.string(), safe=False))
    pieces = [*cut_all(table.to_batches(), HORIZON)]
    (refused,) = (piece for piece in pieces if piece.reason)
    assert events_of(refused).num_rows == 1
    assert events_of(refused)["doc"].cast(pa.binary()).to_pylist() == [b"d\xff"]
    assert sum(events_of(piece).num_rows for piece in pieces if not piece.reason) == table.num_rows - 1


class Unspeakable:
    """An object that says nothing of itself."""

    def __repr__(self) -> str:
        raise RuntimeError


def test_an_object_without_a_text() -> None:
    first, second = cut_all([Unspeakable(), GOOD | {"delta": Unspeakable()}], HORIZON)
    assert "Unspeakable object" in events_of(first)["event"][0].as_py()
    assert second.reason.startswith("delta is <")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.by_default("False")
def test_a_pipeline_goes_on_beside_garbage(tmp_path: Path, grouped: bool) -> None:  # noqa: FBT001
    whole = events(9)
    garbage = [
        "heartbeat", 7, None, b"bytes", [1, {"a": 2}], {}, {"t": 1}, {"event": GOOD}, GOOD | {"x_token": 271.5},
        GOOD | {"x_eos": 2}, GOOD | {"delta": "0.5"}, GOOD | {"study": b"s"}, GOOD | {"t": 2**70}, GOOD | {"f": None},
        pa.table({"a": [1]}), whole.slice(0, 2).set_column(6, "x_token", pa.array([1.5, 2.5])),
    ]  # fmt: skip
    rows = [row | {"x_eos": int(row["x_eos"]), "x_token": float(row["x_token"])} for row in whole.to_pylist()]
    elements = [*garbage[:8], *rows, *garbage[8:]]
    derived = ran(
        lambda pipeline: pipeline | beam.Create(elements) | DeriveTrajectories(HORIZON, grouped=grouped), tmp_path
    )
    assert_equals_batch_path(derived, whole)
    assert sum(letter.events.num_rows for letter in letters(derived)) == len(garbage) + 1
    assert {"x_token is 271.5, must be a whole number (int32)", "f is null"} <= {
        letter.reason for letter in letters(derived)
    }
