"""What a commit compares: the content of units, and the conditions of their study."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fixtures.stored_units import content, edit, expected, make_unit
from fixtures.table_rows import add_rows

from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.store import CONTRADICTIONS, Store, Unit
from kvdrift.log.units import conditions
from kvdrift.log.units.commits import ContradictionError
from kvdrift.schema.errors import InputError, UnlikeUnitsError
from kvdrift.schema.tables import GROUP_KEY, PAIR_COLUMNS
from kvdrift.sql.catalog import open_views
from kvdrift.verification.whole_store import verify


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Store, Store]:
    """Two writers of one store, of which the second has read the empty store."""
    first = Store.create(tmp_path / "store")
    second = Store.open(first.location)
    second.append_units([])
    return first, second


def with_horizon(unit: Unit, horizon: int) -> Unit:
    """Return a unit cut to its first positions."""
    return Unit(unit.record | {"horizon": horizon}, unit.events.filter(pc.less_equal(unit.events["t"], horizon)))


def declare(store: Store, **changed: Any) -> None:
    add_rows(store, "studies", {"horizon": 8, "seed": 3, "settings": "{}"} | changed)


def test_other_content_of_a_stored_unit_is_named_and_set_aside(stores: tuple[Store, Store]) -> None:
    first, second = stores
    unit, delta = make_unit("d0"), make_unit("d0").events["delta"][9].as_py()
    other = edit(unit, "delta", 9, delta / 2)
    first.append_units([unit])
    with pytest.raises(ContradictionError) as refused:
        second.append_units([other, make_unit("d1")])
    said = str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == said, "as a cluster's worker sends it"  # noqa: S301
    assert all(part in said for part in ("delta is", "replicate 1, t 2", repr(delta), "d0"))
    (aside,) = Path(first.location, CONTRADICTIONS).iterdir()
    assert str(aside.parent) in said
    assert pq.read_table(aside)["delta"].to_pylist() == other.events["delta"].to_pylist()
    assert content(first).equals(expected([unit])), "nothing of the commit is there"
    assert second.append_units([unit, make_unit("d1")]) == 1, "and an equal unit is there already"


def test_one_unit_given_with_two_contents_is_refused(stores: tuple[Store, Store]) -> None:
    unit = make_unit()
    with pytest.raises(InputError, match=r"d0.*twice"):
        stores[0].append_units([unit, edit(unit, "x_token", 0, 501)])
    assert content(stores[0]).num_rows == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 4), ("weights_sha256", "b"), ("tokenizer_sha256", "b"), ("numerics", 9), ("eos_tokens", "2")],
)
def test_a_writer_that_has_seen_an_empty_study_cannot_begin_the_study_otherwise(
    stores: tuple[Store, Store], name: str, value: Any
) -> None:
    known = {"seed": 3, "weights_sha256": "a", "tokenizer_sha256": "a", "numerics": 8, "eos_tokens": "1"}
    first, second = stores
    first.append_units([make_unit("d0", **known)])
    with pytest.raises(UnlikeUnitsError, match=f"{name} is .*{value}") as refused:
        second.append_units([make_unit("d1", **(known | {name: value}))])
    assert str(known[name]) in str(refused.value)
    assert second.append_units([make_unit("d2", **(known | {name: None}))]) == 1, "null is unknown"


def test_a_study_has_one_horizon(stores: tuple[Store, Store]) -> None:
    first, second = stores
    first.append_units([make_unit("d0")])
    with pytest.raises(UnlikeUnitsError, match=r"horizon is 8 .* and 4|horizon is 4 .* and 8"):
        second.append_units([with_horizon(make_unit("d1", "recent"), 4)])
    with pytest.raises(UnlikeUnitsError, match="horizon"):
        first.append_units([make_unit("d2"), with_horizon(make_unit("d1"), 4)])
    assert len(first.units()) == 1


@pytest.mark.parametrize(("name", "value"), [("horizon", 16), ("seed", 4)])
def test_units_are_held_against_the_row_of_their_study(stores: tuple[Store, Store], name: str, value: int) -> None:
    first, second = stores
    declare(first, **{name: value})
    with pytest.raises(UnlikeUnitsError, match=f"{name} is .*{value} in its row in studies"):
        second.append_units([make_unit("d0", seed=3)])
    assert len(first.units()) == 0


def test_a_revision_may_begin_a_study_anew(stores: tuple[Store, Store]) -> None:
    """Once no unit of the earlier horizon is current."""
    first, second = stores
    first.append_units([make_unit("d0")])
    add_rows(first, "actions", {"action": "snapkv", "action_revision": 1})
    assert second.append_units([with_horizon(make_unit("d0", action_revision=1), 4)]) == 1
    with pytest.raises(UnlikeUnitsError, match="horizon is"):
        first.append_units([make_unit("d1", action_revision=1)])


def once_before_a_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], int]) -> list[int]:
    """Have ``act`` called when a writer is between its look at the store and its commit of events; return its result."""
    put, begun = DeltaFolder.put_rows, list[int]()

    def put_late(folder: DeltaFolder, table: str, *given: Any, **more: Any) -> Any:
        if table == "events" and not begun:
            begun.append(0)
            begun[0] = act()
        return put(folder, table, *given, **more)

    monkeypatch.setattr(DeltaFolder, "put_rows", put_late)
    monkeypatch.setattr(DeltaFolder, "turn", lambda *_: nullcontext())
    return begun


@pytest.mark.parametrize(
    ("docs", "between", "unit", "message"),
    [
        ((), with_horizon(make_unit("d2"), 4), make_unit("d3"), "horizon is 8 .* 4"),  # both begin the study
        (("d0", "d1"), make_unit("d2", weights_sha256="b"), make_unit("d3", weights_sha256="a"), "weights_sha256 is"),
        (("d0", "d1"), make_unit("d2", seed=3), make_unit("d3", seed=4), "seed is 4 .* 3"),
    ],
)
@pytest.mark.parametrize("merged", [False, True])
def test_a_condition_that_a_study_did_not_have_concerns_every_writer(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch,
    docs: tuple[str, ...], between: Unit, unit: Unit, message: str, *, merged: bool,
) -> None:  # fmt: skip
    """The second states it while the first is between its look at the store and its commit, and may merge files."""
    first, second = stores
    for writer, doc in zip(stores, docs, strict=False):
        writer.append_units([make_unit(doc)])

    def meanwhile() -> int:
        added = second.append_units([between])
        if merged:
            second.compact("events")
        return added

    begun = once_before_a_commit(monkeypatch, meanwhile)
    with pytest.raises(UnlikeUnitsError, match=message):
        first.append_units([unit])
    assert begun == [1]
    assert len(first.units()) == len(docs) + 1


def test_a_seed_that_a_study_had_not_is_its_seed_from_then_on(stores: tuple[Store, Store]) -> None:
    """The study has begun without a seed, as other generators do."""
    first, second = stores
    assert first.append_units([make_unit("d0")]) + second.append_units([make_unit("d1")]) == 2
    assert first.append_units([make_unit("d2", seed=3)]) == 1
    with pytest.raises(UnlikeUnitsError, match=r"seed is 4 .* 3"):
        second.append_units([make_unit("d3", seed=4)])


def without_divergences(unit: Unit) -> Unit:
    """Return a unit as another generator's events make it."""
    columns = {name: unit.events[name] for name in unit.events.column_names}
    columns |= {name: pa.nulls(len(unit.events), columns[name].type) for name in ("kl", "kl_own", "top1")}
    return Unit(unit.record, pa.table(columns, schema=unit.events.schema))


def test_many_units_at_once_are_as_one_by_one(tmp_path: Path) -> None:
    units = [
        without_divergences(make_unit(f"d{n}", action, first, 1 + n % 3))
        for n in range(5)
        for action in ("a", "b")
        for first in (0, 7)
    ]
    one, many = Store.create(tmp_path / "one"), Store.create(tmp_path / "many")
    one.append_units(units)
    events = pa.concat_tables([unit.events for unit in units])
    values = {name: events[name].to_numpy() for name in PAIR_COLUMNS if name not in GROUP_KEY}
    assert len(many.add_pairs([unit.record for unit in units], values)) == len(units)
    assert many.add_pairs([unit.record for unit in units], values) == set()
    assert content(many).equals(content(one))
    assert many.units().sort_by("unit").equals(one.units().sort_by("unit"))
    wrong = values | {"t": np.roll(values["t"], 1)}
    with pytest.raises(InputError, match=r"t is \d+ where \(s, .* needs 1 \(row 1\)"):
        many.add_pairs([unit.record for unit in units], wrong)
    for name in ("replicate", "t", "delta"):
        for column in (values[name][:-1], np.append(values[name], values[name][-1:])):
            with pytest.raises(InputError, match=f"{name} has {len(column)} values"):
                many.add_pairs([unit.record for unit in units], values | {name: column})
    with pytest.raises(InputError, match="0 rows"):
        many.add_pairs([], values)


def test_a_store_with_two_seeds_is_named_and_not_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two histories of a study in one folder make it."""
    store = Store.create(tmp_path / "store")
    store.append_units([make_unit("d0", seed=3)])
    with monkeypatch.context() as patch:
        patch.setattr(conditions, "check_conditions", lambda *_: None)
        store.append_units([make_unit("d1", seed=4)])
    named = r"study 's', model 'org/model': seed is 4 .*and 3 "
    (check,) = (one for one in verify(Store.open(store.location)) if one.subject == "conditions")
    assert [bool(re.search(named, str(fault))) for fault in check.faults] == [True]
    with open_views(store) as views:
        assert views.connection.sql("select count(*) from units").fetchall() == [(2,)]
        with pytest.raises(duckdb.Error, match=named):
            views.connection.sql("select * from decomposition").fetchall()
    with pytest.raises(UnlikeUnitsError, match=named):
        Store.open(store.location).append_units([make_unit("d2", seed=3)])
