"""What a commit compares: the content of units, and the conditions of their study."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fixtures.stored_units import content, edit, expected, make_unit

from log.store import Store, Unit
from log.units.contradictions import ContradictionError
from schema.errors import InputError, UnlikeUnitsError
from schema.tables import ACTIONS, STUDIES


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
    row = dict.fromkeys(STUDIES.columns) | {"study": "s", "model": "org/model", "horizon": 8, "seed": 3} | changed
    row |= {"study_sha256": "", "settings": "{}", "temperature": 1.0}
    for field in STUDIES.schema:
        if row[field.name] is None and not field.nullable:
            row[field.name] = 1
    store.append_rows("studies", pa.Table.from_pylist([row], schema=STUDIES.schema))


def test_other_content_of_a_stored_unit_is_named_and_set_aside(stores: tuple[Store, Store]) -> None:
    first, second = stores
    unit, delta = make_unit("d0"), make_unit("d0").events["delta"][9].as_py()
    other = edit(unit, "delta", 9, delta / 2)
    first.append_units([unit])
    with pytest.raises(ContradictionError) as refused:
        second.append_units([other, make_unit("d1")])
    said = str(refused.value)
    assert "delta is" in said and "replicate 1, t 2" in said and repr(delta) in said and "d0" in said
    (aside,) = Path(first.location, "aside").iterdir()
    assert str(aside.parent) in said
    assert pq.read_table(aside)["delta"].to_pylist() == other.events["delta"].to_pylist()
    assert content(first).equals(expected([unit])), "nothing of the commit is there"
    assert second.append_units([unit, make_unit("d1")]) == 1, "and an equal unit is there already"


def test_one_unit_given_with_two_contents_is_refused(stores: tuple[Store, Store]) -> None:
    unit = make_unit()
    with pytest.raises(InputError, match="d0.*twice"):
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
    with pytest.raises(UnlikeUnitsError, match="horizon is 8 .* and 4|horizon is 4 .* and 8"):
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
    row = dict.fromkeys(ACTIONS.columns) | {
        "study": "s", "action": "snapkv", "selector": "external", "keep": "unknown", "position_mode": "unknown",
        "control": False, "action_revision": 1, "dropped": False, "prespecified": True,
    }  # fmt: skip
    first.append_rows("actions", pa.Table.from_pylist([row], schema=ACTIONS.schema))
    assert second.append_units([with_horizon(make_unit("d0", action_revision=1), 4)]) == 1
    with pytest.raises(UnlikeUnitsError, match="horizon is"):
        first.append_units([make_unit("d1", action_revision=1)])


def test_two_writers_cannot_begin_a_study_at_once(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second commits while the first is between its look at the store and its commit."""
    first, second = stores
    put, begun = first._folder.put_rows, list[int]()

    def put_late(*given: Any, **more: Any) -> Any:
        if given[0] == "events" and not begun:
            begun.append(second.append_units([with_horizon(make_unit("d1"), 4)]))
        return put(*given, **more)

    monkeypatch.setattr(first._folder, "put_rows", put_late)
    monkeypatch.setattr("log.delta.folder.DeltaFolder._turn", lambda *_: _no_turn())
    with pytest.raises(UnlikeUnitsError, match="horizon"):
        first.append_units([make_unit("d0")])
    assert begun == [1]
    assert first.units()["horizon"].to_pylist() == [4]


def _no_turn() -> Any:
    from contextlib import nullcontext

    return nullcontext()
