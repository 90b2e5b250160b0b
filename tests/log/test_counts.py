"""Counts of documents and their units, compared with plain loops over rows."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.stored_units import make_unit
from fixtures.table_rows import add_rows

from kvdrift.log.counts import Scored
from kvdrift.log.store import Store
from kvdrift.schema.tables import SCORES

DOCUMENTS_OF_A_SPLIT = 24

Row = dict[str, Any]


def document(number: int) -> Row:
    """Return a document; some have answers, others none, or empty ones."""
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
    add_rows(store, "documents", *map(document, numbers))


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
    """Return a copy of the store."""
    return Store.open(shutil.copytree(made, tmp_path / "store"))


def newest_documents(store: Store) -> list[Row]:
    """The newest revision of each document."""
    rows = sorted(store.read("documents").to_pylist(), key=lambda row: row["document_revision"])
    return list({row["doc"]: row for row in rows}.values())


def counted(store: Store) -> Counter[tuple[Any, ...]]:
    """Count the units of documents under an action, by plain loops over rows."""
    documents = {row["doc"]: row for row in newest_documents(store)}
    held = defaultdict[str, dict[tuple[str, int, str], list[int]]](dict)
    for row in store.units().to_pylist():  # no action has a row, so that all are current
        kind = (row["action"], row["action_revision"], row["estimator"])
        sums = held[row["doc"]].setdefault(kind, [0, 0, 0])
        for at, value in enumerate((row["replicates"], 1, row["weights_sha256"] is None)):
            sums[at] += value
    found = Counter[tuple[Any, ...]]()
    for doc, kinds in held.items():
        own = documents.get(doc, {"split": None, "stratum": None})
        for kind, sums in kinds.items():
            found[own["split"], own["stratum"], *kind, *sums] += 1
    return found


def check_counts(store: Store) -> None:
    """The same by plain loops and as the store counts; and so for a process that opens it anew."""
    for opened in (store, Store.open(store.location)):
        found = Counter[tuple[Any, ...]]()
        counts = opened.counts(opened.read("actions"))
        for (place, held), count in counts.units.items():
            found[place.split, place.stratum, *held] += count
        assert found == counted(store)
        assert counts.current == counts.units
        assert counts.generated.total() == len(store.units()["doc"].unique())
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
    for table in ("documents", "units", "scores"):
        store.compact(table)


def revise(store: Store, *numbers: int) -> None:
    """Give documents other answers, and score a few pairs by them."""
    rows = [document(number) | {"answers": ["other"], "document_revision": 1} for number in numbers]
    add_rows(store, "documents", *rows)


def test_counts_are_those_of_the_rows(store: Store) -> None:
    check_counts(store)
    compact_all(store)
    check_counts(store)
    store.append_units([make_unit("d00", first=8), make_unit("unheard of")])
    store.append_rows("scores", scores(0, first=8))
    check_counts(store)


@pytest.mark.parametrize("compacted", [False, True])
def test_of_revised_documents_the_newest_answers_and_scores_by_them_count(store: Store, *, compacted: bool) -> None:
    if compacted:
        compact_all(store)
    revise(store, 3, 4, 5)
    check_counts(store)
    rescored = scores(4).to_pylist()
    rows = [row | {"document_revision": 1} for row in rescored]
    add_rows(store, "scores", *rows)
    check_counts(store)
