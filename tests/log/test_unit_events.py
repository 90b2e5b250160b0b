"""SWRB units in the store: whole scans with their branches go in, each break of a rule is one line, and nothing mixes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, WriterProperties
from fixtures.branched_units import NAMES, H, make_rows, row, swrb_unit
from fixtures.refusals import refused
from fixtures.stored_units import HORIZON, content, expected, make_unit
from fixtures.swrb_events import drawn_unit, random_laws

from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import EVENTS

DOC = EVENTS.schema.names.index("doc")


def row_groups(path: Path) -> list[pq.RowGroupMetaData]:
    """The parts of a file, as its footer describes them."""
    footer = pq.read_metadata(path)
    return [footer.row_group(number) for number in range(footer.num_row_groups)]


def changed(kind: str, replicate: int, t: int, /, **values: Any) -> list[dict[str, Any]]:
    """The rows with some values of one row changed."""
    rows = make_rows()
    (found,) = (row for row in rows if (row["kind"], row["replicate"], row["t"]) == (kind, replicate, t))
    found |= values
    return rows


def without(kind: str, replicate: int, *positions: int) -> list[dict[str, Any]]:
    """The rows but for one kind of a replicate, or for some of its positions."""
    return [
        row for row in make_rows()
        if (row["kind"], row["replicate"]) != (kind, replicate) or (positions and row["t"] not in positions)
    ]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that takes nothing."""
    return Store.create(tmp_path_factory.mktemp("empty") / "store")


def test_a_unit_comes_back_in_its_order(store: Store) -> None:
    rows = make_rows()
    shuffled = [rows[at] for at in np.random.default_rng(3).permutation(len(rows))]
    assert store.append_units([swrb_unit(shuffled)]) == 1
    names = [name for name in EVENTS.columns if name != "unit"]
    assert store.read("events", columns=names).to_pylist() == [{name: row.get(name) for name in names} for row in rows]
    (found,) = store.units("b").to_pylist()
    assert (found["estimator"], found["first_replicate"], found["replicates"]) == ("swrb", 5, 3)
    assert store.append_units([swrb_unit(rows)]) == 0


def test_units_of_random_laws_are_whole(store: Store) -> None:
    """Scans and branches as the algorithm draws them, with laws that part wholly at a position in every other unit."""
    chance = np.random.default_rng(11)
    units = []
    for number in range(8):
        laws = random_laws(chance, 6, apart_at=number % 2 * 5)
        units.append(drawn_unit(NAMES | {"doc": f"d{number}"}, "swrb", laws, chance, range(16)))
    assert store.append_units(units) == 8
    assert content(store).equals(expected(units))


def test_all_of_no_mass_is_whole(store: Store) -> None:
    rows = [row("scan", 0, t, (t, t), 0.0) for t in range(1, H + 1)]
    assert store.append_units([swrb_unit(rows, first_replicate=0, replicates=1)]) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "replicate 5 of .* has no scan rows"),
        (without("scan", 6), r"replicate 6 of \(b, org/model, d0, snapkv\) swrb replicates \[5, 8\) has no scan rows"),
        (changed("scan", 6, 1, replicate=9), r"replicate is not one of the unit's .*scan of replicate 9, t = 1"),
        (changed("scan", 6, 4, t=5), "t is 5, must be within 1..4"),
        (without("scan", 6, 2), r"t is 3, must be 2 .*scan of replicate 6, t = 3"),
        (without("scan", 6, 1), "t is 2, must be 1 "),
        ([*make_rows(), make_rows()[0]], "t is 1, must be 2"),
        (without("scan", 6, 4), "rows end at 3, must go on to 4 .*scan of replicate 6"),
        (changed("scan", 7, 3, x_token=8, y_token=8), "rows end at 3, must go on to 4 .*scan of replicate 7"),
        (changed("scan", 5, 2, x_token=-1, y_token=-1), "x_token is -1, which only a scan's last row can have"),
        (changed("scan", 5, 2, x_token=7), "x_token is 7 and y_token 52, must be equal in a scan"),
        (changed("scan", 5, 2, x_eos=True), "x_eos is True and y_eos False, must be equal in a scan"),
        (changed("scan", 5, 1, weight=None), "weight is null, must be given in a scan .*scan of replicate 5, t = 1"),
        (changed("scan", 5, 1, weight=1.5), "weight is 1.5, must be within"),
        (changed("scan", 5, 1, weight=-0.5), "weight is -0.5, must be within"),
        (changed("scan", 5, 1, weight=float("nan")), "weight is nan, must be within"),
        (changed("branch", 5, 3, weight=0.5), "weight is 0.5, must be null.*branch of replicate 5, t = 3"),
        (changed("branch", 5, 2, x_token=2), "tokens are equal where the branch starts.*branch of replicate 5, t = 2"),
        (without("branch", 5, 3), "t is 4, must be 3 .*branch of replicate 5"),
        (without("branch", 5, 4), "rows end at 3, must go on to 4 .*branch of replicate 5"),
        (without("branch", 5), "scan has a weight above 0 but no branch .*scan of replicate 5, t = 1"),
        (changed("scan", 6, 4, weight=0.1), "scan has a weight above 0 but no branch .*replicate 6"),
        ([*make_rows(), row("branch", 6, 4, (1, 2), None)], "scan has a branch but no weight above 0 .*replicate 6"),
        (without("branch", 5, 2), "branch starts where its scan has no weight above 0 .*replicate 5, t = 3"),
        ([*without("branch", 7), row("branch", 7, 4, (1, 2), None)],
         "branch starts where its scan has no weight above 0 .*replicate 7, t = 4"),
        (changed("scan", 5, 1, kind="coupled"), "kind is 'coupled' in .*, must be 'scan' or 'branch'"),
        (changed("scan", 5, 1, doc="d1"), "doc is 'd1', must be 'd0' as in the unit"),
    ],
)  # fmt: skip
def test_a_unit_that_is_not_whole_is_refused(empty: Store, rows: list[dict[str, Any]], message: str) -> None:
    before = empty.versions()
    assert re.match(f"events: .*{message}", refused(empty.append_units, [make_unit("good"), swrb_unit(rows)]))
    assert empty.versions() == before


def test_replicates_of_the_estimators_are_apart(store: Store) -> None:
    whole = make_unit(first=4)
    rows = whole.events.filter(pc.less_equal(whole.events["t"], H)).drop_columns("study")
    plain = Unit(
        whole.record | {"study": NAMES["study"], "horizon": H},
        rows.append_column("study", [[NAMES["study"]] * len(rows)]),
    )
    assert store.append_units([plain, swrb_unit(make_rows())]) == 2
    assert store.append_units([plain, swrb_unit(make_rows())]) == 0
    with pytest.raises(InputError, match=r"swrb replicates \[5, 7\) overlaps the replicates \[5, 8\)"):
        store.append_units([swrb_unit([row for row in make_rows() if row["replicate"] < 7], replicates=2)])
    assert sorted(store.units().column("estimator").to_pylist()) == ["plain", "swrb"]


def test_parts_of_a_file_with_other_documents_are_not_read(store: Store) -> None:
    units = [make_unit(doc) for doc in ("d0", "d1", "d2")]
    store.append_units(units)
    rows = units[0].events.num_rows
    table = DeltaTable(f"{store.location}/events")
    table.optimize.z_order(["doc"], writer_properties=WriterProperties(max_row_group_size=rows))
    (path,) = (Path(store.location, "events", name) for name in pa.table(table.get_add_actions())["path"].to_pylist())
    (lost,) = (part.column(0) for part in row_groups(path) if part.column(DOC).statistics.min == "d1")
    with path.open("r+b") as file:  # the first page of the document between the two others
        file.seek(lost.dictionary_page_offset or lost.data_page_offset)
        file.write(bytes(64))

    numbers = dict(zip(*store.units(columns=("doc", "unit")).to_pydict().values(), strict=True))
    reader = store.rows_of_units("events")
    for doc in ("d0", "d2"):
        assert reader.read([numbers[doc]], [doc], ["doc", "t"], rows).num_rows == rows
    assert not reader.unreadable
    assert reader.read([numbers["d1"]], ["d1"], ["study", "t"], rows).num_rows == 0
    assert [*reader.unreadable] == [path.name]


def test_files_without_the_documents_are_not_opened_again(store: Store) -> None:
    for doc in ("d0", "d1"):
        store.append_units([make_unit(doc)])
    numbers = dict(zip(*store.units(columns=("doc", "unit")).to_pydict().values(), strict=True))
    asked = ([numbers["d0"]], ["d0"], ["doc", "t"])
    assert store.rows_of_units("events").read(*asked).num_rows == HORIZON * 4
    (other,) = (
        path for path in map(Path, store.files("events")) if row_groups(path)[0].column(DOC).statistics.min == "d1"
    )
    other.write_bytes(b"")

    reader = store.rows_of_units("events")
    assert reader.read(*asked).num_rows == HORIZON * 4
    assert not reader.unreadable

    reader = Store.open(store.location).rows_of_units("events")  # another process knows nothing of the file
    assert reader.read(*asked).num_rows == HORIZON * 4
    assert [*reader.unreadable] == [other.name]


def test_older_files_with_the_documents_are_not_read(store: Store) -> None:
    """Of documents with rows of earlier actions, only the files of the new action are read."""
    for action in ("first", "second"):
        store.append_units([make_unit(doc, action) for doc in ("d0", "d1")])
        if action == "first":
            (older,) = map(Path, store.files("events"))
    older.write_bytes(older.read_bytes()[:8] + bytes(64) + older.read_bytes()[72:])
    numbers = {row["unit"] for row in store.units(columns=("action", "unit")).to_pylist() if row["action"] == "second"}
    reader = store.rows_of_units("events")
    assert reader.read(numbers, ["d0", "d1"], ["t"], 2 * HORIZON * 4).num_rows == 2 * HORIZON * 4
    each = reader.read_each([*numbers], ["d0", "d1"], ["t"], 2 * HORIZON * 4)
    assert [rows.num_rows for rows in each] == [HORIZON * 4] * 2
    assert not reader.unreadable
    assert reader.read(numbers, ["d0", "d1"], ["study", "t"]).num_rows == 2 * HORIZON * 4  # all files are read
    assert [*reader.unreadable] == [older.name]
