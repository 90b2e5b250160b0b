"""What documents have, counted: the same from the rows, from a compacted file's footer, and from both."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.refusals import refused
from fixtures.stored_units import make_unit
from log.compaction.counts import Scored
from log.compaction.members import packed
from log.compaction.rows import compact_rows

from log.compaction import counts
from log.store import Store
from schema.errors import DamagedStoreError
from schema.tables import DOCUMENTS, SCORES

DOCUMENTS_OF_A_SPLIT = 24

Row = dict[str, Any]


def document(number: int) -> Row:
    """Of some there are answers, of others none, or empty ones."""
    split = "development" if number % 2 else "evaluation"
    return {
        "study": "s", "model": "org/model", "doc": f"d{number:02}", "split": split, "stratum": f"S{number % 3}",
        "cluster": f"d{number:02}", "source": "embedded", "task": "needle",
        "answers": [["a"], ["", "b"], [[""], None, []][number // 3 % 3]][number % 3], "scoring": "part" if number % 2 else None,
        "document_revision": 0,
    }  # fmt: skip


def scores(*numbers: int, first: int = 0) -> pa.Table:
    """Of pairs of documents under an action."""
    rows = [
        {
            "study": "s", "model": "org/model", "doc": f"d{number:02}", "action": action, "action_revision": revision,
            "replicate": first + replicate, "scoring": "all", "score_x": 1.0, "score_y": 0.5,
            "document_revision": 0,
        }
        for number in numbers for action, revision in (("snapkv", 0), ("h2o", 1)) for replicate in range(4)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, SCORES.schema)


def answers_of(row: Row) -> tuple[Any, ...] | None:
    return tuple(row[name] for name in ("source", "task", "scoring")) if any(row["answers"] or ()) else None


def append_documents(store: Store, *numbers: int) -> None:
    store.append_rows("documents", pa.Table.from_pylist([document(number) for number in numbers], DOCUMENTS.schema))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that all have one action, and some a revision of another one, in several files of each table."""
    store, numbers = Store.create(tmp_path_factory.mktemp("made") / "store"), range(2 * DOCUMENTS_OF_A_SPLIT)
    append_documents(store, *numbers[::2])
    append_documents(store, *numbers[1::2])
    store.append_units([make_unit(f"d{number:02}") for number in numbers])
    store.append_units([make_unit(f"d{number:02}", first=4, weights_sha256="ab") for number in numbers])
    store.append_units([make_unit(f"d{number:02}", "h2o", action_revision=1) for number in numbers[:30]])
    store.append_rows("scores", scores(*numbers[:20]))
    store.append_rows("scores", scores(*numbers[20:]))
    return Path(store.location)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    """A copy of it."""
    return Store.open(shutil.copytree(made, tmp_path / "store"))


def newest_documents(store: Store) -> list[Row]:
    """The newest revision of each document."""
    rows = sorted(store.read("documents").to_pylist(), key=lambda row: row["document_revision"])
    return list({row["doc"]: row for row in rows}.values())


def counted(store: Store) -> Counter[tuple[str | None, ...]]:
    """Documents and what they have, by plain loops over rows."""
    documents = {row["doc"]: row for row in newest_documents(store)}
    held = defaultdict[str, dict[tuple[str, int, str], list[int]]](dict)
    for row in store.units().to_pylist():  # no action has a row, so that all are current
        kind = (row["action"], row["action_revision"], row["estimator"])
        sums = held[row["doc"]].setdefault(kind, [0, 0, 0])
        for at, value in enumerate((row["replicates"], 1, row["weights_sha256"] is None)):
            sums[at] += value
    found = Counter[tuple[str | None, ...]]()
    for doc, kinds in held.items():
        own = documents.get(doc, {"split": None, "stratum": None})
        found[own["split"], own["stratum"], str(sorted((*kind, *sums) for kind, sums in kinds.items()))] += 1
    return found


def check_counts(store: Store) -> None:
    """The same by plain loops and as the store counts; and so for a process that opens it anew."""
    for opened in (store, Store.open(store.location)):
        found = Counter[tuple[str | None, ...]]()
        counts = opened.counts()
        for (place, own), count in counts.units.items():
            found[place.split, place.stratum, str(sorted(map(tuple, own)))] += count
        assert found == counted(store)
        rows = newest_documents(store)
        splits = {row["doc"]: row["split"] for row in rows}
        present = {row["doc"]: row["document_revision"] for row in rows}
        assert counts.documents == Counter(
            (row["study"], row["model"], row["split"], row["stratum"], answers_of(row)) for row in rows
        )
        scores = store.read("scores").to_pylist()
        assert counts.scores == Counter(
            Scored("s", "org/model", splits.get(row["doc"]), row["action"], row["action_revision"])
            for row in scores if row["document_revision"] == present.get(row["doc"], 0)
        )  # fmt: skip


def compact_all(store: Store) -> None:
    assert all(compact_rows(store._folder, table) for table in ("documents", "units", "scores"))


@pytest.mark.parametrize("compacted", [False, True])
def test_of_revised_documents_the_newest_answers_and_scores_by_them_count(store: Store, *, compacted: bool) -> None:
    """Answers that came, went and changed; some pairs are scored by the present ones."""
    if compacted:
        compact_all(store)
    revised = [document(number) | {"answers": answers, "document_revision": revision}
               for number, answers, revision in ((0, [], 1), (1, ["c"], 1), (2, ["d"], 1), (2, ["e"], 2))]  # fmt: skip
    store.append_rows("documents", pa.Table.from_pylist(revised, DOCUMENTS.schema))
    check_counts(store)
    again = scores(1).to_pylist() + scores(2).to_pylist()
    store.append_rows("scores", pa.Table.from_pylist([row | {"document_revision": 1} for row in again], SCORES.schema))
    check_counts(store)
    assert all(compact_rows(store._folder, table) for table in ("documents", "scores"))
    check_counts(store)


def test_counts_are_those_of_the_rows_before_and_after_a_compaction(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_counts(store)
    before = store.counts()
    compact_all(store)
    check_counts(store)
    with monkeypatch.context() as patch:
        for name in ("count_units", "count_documents", "count_scores"):
            patch.setattr(counts, name, lambda *_: pytest.fail("rows are counted"))
        assert store.counts() == before


def test_later_rows_are_counted_once_beside_the_counts_of_earlier_ones(store: Store) -> None:
    """Of new documents, of those that have been counted, and of a document that has no row yet."""
    compact_all(store)
    append_documents(store, 90, 91)
    store.append_units([make_unit("d90"), make_unit("d47", "h2o", action_revision=1)])
    store.append_rows("scores", scores(47, first=4))
    check_counts(store)
    store.append_units([make_unit("d03", first=8, replicates=2), make_unit("d92")])
    check_counts(store)
    append_documents(store, 92)
    check_counts(store)
    compact_all(store)
    check_counts(store)


def test_rows_that_a_killed_writer_left_out_are_counted(store: Store) -> None:
    compact_all(store)
    store.append_units([make_unit("d03", first=8, replicates=2)])
    late = next(file.path for file in store.stored_files("units") if file.rows == 1)
    store._folder.remove("units", {late})
    assert store.row_count("units") == store.units().num_rows - 1
    check_counts(store)


def test_a_document_without_a_row_is_counted_where_it_belongs_once_it_has_one(store: Store) -> None:
    """Although the units were compacted before."""
    store.append_units([make_unit("d92")])
    compact_all(store)
    check_counts(store)
    append_documents(store, 92)
    check_counts(store)


def test_counts_that_are_no_fewer_than_rows_are_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_WORTHWHILE", 1000)
    compact_all(store)
    (file,) = store.stored_files("units")
    assert b"kvdrift.counts" not in store.read_bytes("units", file.path)
    check_counts(store)


def test_counts_that_are_not_those_of_the_rows_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number below zero is believed: the file is not as it was written."""
    with monkeypatch.context() as patch:
        wrong = [[["s", "org/model", "evaluation", "S0", None], [["other", 0, "plain", 4, 1, 1]]], 48]
        patch.setattr(counts, "packed", lambda _: packed([wrong]))
        assert compact_rows(store._folder, "units")
    store.append_units([make_unit("d03", first=8, replicates=2)])
    line = refused(store.counts, error=DamagedStoreError)
    assert "the counts of compacted-" in line
    assert line.endswith("--repair")


def test_a_footer_that_cannot_be_read_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(counts, "packed", lambda _: "no counts")
        assert compact_rows(store._folder, "documents")
    assert "no counts in its footer" in refused(store.counts, error=DamagedStoreError)
