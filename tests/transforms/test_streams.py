"""Events that arrive as a stream: in any order, late, twice, in part or wrong, through the Beam transforms."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.testing import test_stream
from apache_beam.transforms.window import TimestampedValue
from fixtures.beam_results import HORIZON, assert_equals_batch_path, events, letters, ran, shuffled
from fixtures.random_units import branched_unit, unit

from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.transforms import AssembleReplicates, DeriveTrajectories, ReadEvents, WriteDerived, WriteReplicates
from kvdrift.transforms.derivation import derive_trajectories
from kvdrift.transforms.streams import assembly
from kvdrift.transforms.streams.assembly import ROW, cut, events_of, table_of, unpacked
from kvdrift.transforms.streams.replicates import DerivedReplicates
from kvdrift.transforms.streams.stored import ReadVersions, write_derived


def in_batches(table: pa.Table, rows: int) -> list[pa.Table]:
    return [table.slice(first, rows).combine_chunks() for first in range(0, table.num_rows, rows)]


def derived_of(elements: Iterable[Any], folder: Path, **options: Any) -> list[Any]:
    made = [*elements]
    return ran(lambda pipeline: pipeline | beam.Create(made) | DeriveTrajectories(HORIZON, **options), folder)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.by_default("True")
def test_any_order_and_twice_is_the_batch_path(tmp_path: Path, grouped: bool) -> None:  # noqa: FBT001
    whole = events()
    stream = shuffled(whole, doubled=0.05, late=0.01)
    batches = in_batches(stream, 37)
    elements = [*batches[:5], *batches[5].to_pylist(), batches[6].to_batches()[0], *batches[7:]]
    derived = derived_of(elements, tmp_path / "out", grouped=grouped)
    assert_equals_batch_path(derived, whole)
    assert not letters(derived)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
def test_replicates_that_stop_after_both_ends_are_whole(tmp_path: Path, grouped: bool) -> None:  # noqa: FBT001
    """Some rows after the ends come, some of them late, and some with another token that pads."""
    whole = events(60)
    ended = pc.and_(whole["x_eos"], whole["y_eos"]).to_numpy()
    first = ended & ~np.roll(ended, 1) | (whole["t"].to_numpy() == 1)
    t, pair = whole["t"].to_numpy(), whole["replicate"].to_numpy()
    kept = ~ended | first | (pair % 3 == 0) | ((pair % 3 == 1) & np.roll(first & ended, 1))
    assert kept.sum() < len(kept) - 10
    pads = pa.array(np.where(ended & ~first & (pair % 6 == 0), 5, whole["x_token"].to_numpy()))
    late = (
        whole.set_column(6, "x_token", pads)
        .set_column(7, "y_token", pads)
        .filter(pa.array(ended & ~first & (t == HORIZON)))
    )
    elements = [*in_batches(shuffled(whole.filter(pa.array(kept)), doubled=0.05), 37), *([] if grouped else [late])]
    derived = derived_of(elements, tmp_path / "out", grouped=grouped)
    assert_equals_batch_path(derived, whole)
    assert not letters(derived)


@pytest.mark.parametrize("grouped", [False, True])
def test_what_never_gets_whole_is_a_dead_letter_with_its_rows(tmp_path: Path, grouped: bool) -> None:  # noqa: FBT001
    whole = events(8)
    number = whole["replicate"].to_numpy()
    t = whole["t"].to_numpy()
    lacking, contradicting = (number == 2) & (t == 5), (number == 3) & (t == 4)
    other = whole.filter(pa.array(contradicting))
    other = other.set_column(
        other.column_names.index("x_token"), "x_token", pc.add(other["x_token"], pa.scalar(1, pa.int32()))
    )
    beyond = whole.slice(0, 1).set_column(5, "t", pa.array([HORIZON + 1], pa.int32()))
    unread = whole.slice(0, 3).drop_columns(["delta"])
    derived = derived_of(
        [
            pa.concat_tables([whole.filter(pa.array(~lacking)), other]),
            beyond,
            unread,
            {**whole.to_pylist()[0], "t": "first"},
        ],
        tmp_path / "out",
        grouped=grouped,
    )
    assert_equals_batch_path(derived, whole.filter(pa.array((number != 2) & (number != 3))))
    found = {letter.reason: letter.events for letter in letters(derived)}
    assert {reason: rows.num_rows for reason, rows in found.items()} == {
        "only 11 of the replicate's 12 positions came": 11,
        "rows of one position contradict each other": 13,
        "t is outside of 1..H, or the replicate is negative": 1,
        "events lack the column delta": 3,
        "t is 'first', must be a whole number (int32)": 1,
    }
    assert set(found["only 11 of the replicate's 12 positions came"]["replicate"].to_pylist()) == {2}
    assert found["events lack the column delta"].equals(unread)


def test_rows_that_cannot_be_of_a_pair() -> None:
    whole = events(2)
    null = whole.slice(0, 1).set_column(8, "delta", pa.array([None], pa.float32()))
    scan = whole.slice(0, 2).append_column("kind", pa.array(["scan", "coupled"]))
    assert [piece.reason for piece in cut(null, HORIZON)] == ["delta is null"]
    first, second = cut(scan, HORIZON)
    assert first.reason == "kind is not coupled; events of residual branching can only be derived in a store"
    assert (second.reason, len(unpacked(second.data))) == ("", 1)
    assert [piece.reason for piece in cut(whole, {"another": 3})] == [
        "the horizon of the study is not given; add the study to the transform's horizon"
    ]
    (wide,) = cut(whole.set_column(6, "x_token", pa.array([2**40] * whole.num_rows)), HORIZON)
    assert (wide.reason, events_of(wide)["x_token"][0].as_py()) == ("x_token is not a whole number (int32)", 2**40)


def test_horizons_by_study(tmp_path: Path) -> None:
    short, long = events(4, 5), events(4, 9)
    long = long.set_column(0, "study", pa.array(["long"] * long.num_rows))
    both = pa.concat_tables([short, long])
    batches = in_batches(shuffled(both), 10)
    derived = ran(lambda p: p | beam.Create(batches) | DeriveTrajectories({"s": 5, "long": 9}), tmp_path / "out")
    assert_equals_batch_path(derived, both)


def test_cut_and_put_back() -> None:
    whole = events(30, seed=5)
    revision = np.repeat(np.arange(30) % 2, HORIZON).astype(np.int32)
    whole = whole.append_column("action_revision", pa.array(revision)).append_column(
        "unit", pa.array(revision + 7, pa.int64())
    )
    pieces = [*cut(shuffled(whole), HORIZON)]
    back = table_of([(piece.key, unpacked(piece.data)) for piece in pieces])
    order = [(name, "ascending") for name in ("replicate", "t")]
    assert back.sort_by(order).equals(whole.sort_by(order).cast(back.schema))
    assert len({piece.key for piece in pieces}) == 30
    assert events_of(pieces[0]).num_rows == HORIZON
    assert json.loads(pieces[0].key)[:6] == ["s", "m", "d0", "a", 0, 7]


def test_late_twice_and_out_of_order_in_a_stream(tmp_path: Path) -> None:
    """Event time is in seconds: a replicate waits for 100 s of silence, whatever the watermark says about its rows."""
    whole = events(7)
    of = [whole.filter(pc.equal(whole["replicate"], number)) for number in range(7)]
    conflict = of[0].slice(3, 1).set_column(6, "x_token", pa.array([77], pa.int32()))
    stream = (
        test_stream.TestStream()
        .advance_watermark_to(0)
        .add_elements([of[0].slice(6), of[1].slice(0, 5), of[2]], event_timestamp=10)
        .advance_watermark_to(60)
        .add_elements([of[0].slice(0, 6), of[2].slice(2, 4)], event_timestamp=5)  # late, and again
        .add_elements([of[3].slice(0, 4)], event_timestamp=20)  # late, and never whole
        .add_elements([of[6].slice(0, 4)], event_timestamp=80)
        .add_elements([of[6].slice(4, 4)], event_timestamp=5)  # late, which does not shorten the wait
        .advance_watermark_to(90)
        .add_elements([of[1].slice(5)], event_timestamp=85)  # in time
        .add_elements([conflict], event_timestamp=88)  # of a replicate that came out
        .advance_watermark_to(125)  # the fourth replicate has been silent for 100 s
        .add_elements([of[4], of[6].slice(8)], event_timestamp=126)
        .add_elements([of[3].slice(4)], event_timestamp=126)  # too late: what came before is gone
        .add_elements(of[5].to_pylist(), event_timestamp=127)
        .advance_watermark_to_infinity()
    )
    derived = ran(
        lambda pipeline: pipeline | stream | DeriveTrajectories(HORIZON, patience=100),
        tmp_path / "out", "BundleBasedDirectRunner", ["--streaming"],
    )  # fmt: skip
    assert_equals_batch_path(derived, pa.concat_tables([of[number] for number in (0, 1, 2, 4, 5, 6)]))
    assert sorted((letter.reason, letter.events.num_rows) for letter in letters(derived)) == [
        ("only 4 of the replicate's 12 positions came", 4),
        ("only 8 of the replicate's 12 positions came", 8),
        ("the row contradicts an earlier row of its replicate; the replicate was already whole", 1),
    ]


def test_the_state_of_a_replicate_is_small() -> None:
    """A byte a position and the time of the latest row while positions are missing, afterwards four bytes a position."""
    state: bytes | None = None
    pieces = [piece for batch in in_batches(shuffled(events(1)), 5) for piece in cut(batch, HORIZON)]
    for number, piece in enumerate(pieces, start=1):
        state, whole = assembly.with_positions(state, unpacked(piece.data), HORIZON, latest=number)
        assert (len(state), whole) == (9 + HORIZON, number == len(pieces))
        assert (assembly.latest_of(state), assembly.is_whole(state)) == (number, False)
    (piece,) = cut(events(1), HORIZON)
    assert len(assembly.whole_state(unpacked(piece.data))) == 1 + 4 * HORIZON


def test_a_row_that_comes_again_is_told_from_one_that_contradicts() -> None:
    (piece,) = cut(events(1), HORIZON)
    rows = unpacked(piece.data).copy()
    state = assembly.whole_state(rows)
    assert assembly.is_whole(state)
    for at, name in itertools.product(range(HORIZON), ROW.names or ()):
        assert not assembly.contradicts(state, rows[at : at + 1])
        other = rows[at : at + 1].copy()
        other[name] = not other[name] if other[name].dtype == bool else other[name] + 1
        if name != "t":
            assert assembly.contradicts(state, other), name


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Twelve units in six commits, of which two are of branches."""
    store = Store.create(tmp_path / "store")
    for number in range(0, 12, 2):
        store.append_units([unit(number), branched_unit(number + 1) if number < 4 else unit(number + 1)])
    return store


def test_a_stores_events_are_read_derived_and_written_once(store: Store, tmp_path: Path) -> None:
    def derive(pipeline: Any) -> Any:
        return pipeline | ReadEvents(store.location) | DeriveTrajectories() | WriteDerived(store.location)

    assert sum(ran(derive, tmp_path / "first")) == 10
    assert sum(ran(derive, tmp_path / "again")) == 0
    coupled = store.read("events").filter(pc.equal(store.read("events")["kind"], "coupled"))
    keys = [(name, "ascending") for name in ("doc", "replicate")]
    assert store.read("trajectories").sort_by(keys).equals(derive_trajectories(coupled).trajectories.sort_by(keys))


def test_events_after_a_version(store: Store, tmp_path: Path) -> None:
    after = store.version("units")
    store.append_units([unit(20)])
    (table,) = ran(lambda pipeline: pipeline | ReadEvents(store.location, after=after), tmp_path / "out")
    assert set(table["doc"].to_pylist()) == {"doc 020"}
    assert not ran(lambda pipeline: pipeline | ReadEvents(store.location, after=after + 1), tmp_path / "none")


def test_following_defers_until_there_is_more(store: Store) -> None:
    class Tracker:
        def __init__(self, start: int) -> None:
            self.start, self.stop, self.claimed, self.deferred = start, 2**60, list[int](), 0.0

        def current_restriction(self) -> Any:
            return self

        def try_claim(self, position: int) -> bool:
            self.claimed.append(position)
            return True

        def defer_remainder(self, delay: Any) -> None:
            self.deferred = float(delay)

    class Watermark:
        set_watermark = staticmethod(lambda _: None)

    version = store.version("units")
    tracker = Tracker(0)
    read = [*ReadVersions(0.5).process((store.location, 0, 2**60), tracker, Watermark)]
    assert all(isinstance(value, TimestampedValue) for value in read)
    assert sum(value.value.num_rows for value in read) == 10 * 30
    assert (tracker.claimed, tracker.deferred) == ([version], 0.5)
    store.append_units([unit(30)])
    tracker = Tracker(version + 1)
    (value,) = ReadVersions(0.5).process((store.location, 0, 2**60), tracker, Watermark)
    assert set(value.value["doc"].to_pylist()) == {"doc 030"}


def test_a_part_of_a_unit_is_not_written(store: Store) -> None:
    whole = derive_trajectories(unit_events(store))
    part = DerivedReplicates(whole.trajectories.slice(0, 2), whole.steps.slice(0, 20))
    with pytest.raises(InputError, match=r"20 derived rows of unit \d+, but the unit has 30 events"):
        write_derived(part, store.location)
    foreign = whole.steps.set_column(whole.steps.column_names.index("unit"), "unit", pa.array([5] * 30, pa.int64()))
    with pytest.raises(InputError, match="30 derived rows of unit 5, but the store has no such unit"):
        write_derived(DerivedReplicates(whole.trajectories, foreign), store.location)
    assert store.read("steps").num_rows == 0


def unit_events(store: Store) -> pa.Table:
    rows = store.read("events")
    return rows.filter(pc.equal(rows["doc"], "doc 006"))


def test_whole_replicates_of_another_generator_become_units(tmp_path: Path) -> None:
    whole = events(20, ends=False)
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"doc": f"d{n}", "stratum": "x", "split": "evaluation"}) + "\n" for n in (0, 1))
    )
    batches = in_batches(shuffled(whole, doubled=0.1), 50)
    location = tmp_path / "store"

    def take(pipeline: Any) -> Any:
        pieces = pipeline | beam.Create(batches)
        return pieces | AssembleReplicates(HORIZON) | WriteReplicates(location, documents)

    first, again = ran(take, tmp_path / "first"), ran(take, tmp_path / "again")
    assert {letter.reason for letter in first} == {"the document is neither in the store nor in the --documents file"}
    assert {letter.reason for letter in again} == {letter.reason for letter in first}
    known = whole.filter(pc.not_equal(whole["doc"], "d2"))
    store = Store.open(location)
    assert store.read("events").num_rows == known.num_rows
    assert store.all_underived().size == 0
    expected = derive_trajectories(known).steps.drop_columns(["unit"])
    keys = [(name, "ascending") for name in ("action", "replicate", "t")]
    assert store.read("steps").drop_columns(["unit"]).sort_by(keys).equals(expected.sort_by(keys))
