"""A plan freezes its documents: a later run takes the same documents, whatever their order in the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.own_files import prompts, write_own_study
from fixtures.refusals import refused
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study

from flows.plan.frozen_plan import find_plan
from flows.run.comparison import check_agrees
from flows.run.forecast import forecast
from flows.run.stages import is_planned
from flows.run.study_run import StudyRun
from log.store import Store
from schema.document import SPLITS, split_of
from schema.errors import PlanError
from schema.frozen_text import frozen_sha256, frozen_text
from schema.tables import PLANS
from sql.catalog import open_views

Rows = list[dict[str, Any]]


def own_run(folder: Path, rows: Rows, *changes: tuple[str, str]) -> StudyRun:
    """A run of the study of some prompts, in the folder's store."""
    folder.mkdir(exist_ok=True)
    return run_of(load_study(write_own_study(folder, rows, *changes)), folder / "store")


def named(run: StudyRun) -> dict[str, list[str]]:
    return {split: [one.doc for one in run.material.of_split(split)] for split in SPLITS}


def values(run: StudyRun, views: Sequence[str] = ("events", "moments", "decomposition", "estimates")) -> Any:
    with open_views(run.store) as opened:
        rows = {view: opened.rows(view, study="own").to_pylist() for view in views}
    left_out = {"events_version", "plan_sha256", "status"}
    return {view: [{k: v for k, v in row.items() if k not in left_out} for row in own] for view, own in rows.items()}


def is_done(run: StudyRun) -> bool:
    """Whether the run would generate, derive, plan and estimate nothing; the page is no part of these tests."""
    found = forecast(run)
    work = [split.work for split in found.splits]
    return not check_agrees(run) and not any(work) and not found.underived and found.estimated and is_planned(run)


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    finish(own_run(folder, prompts(16)))
    return folder


@pytest.fixture
def study(finished_once: Path, tmp_path: Path) -> tuple[Path, Rows]:
    """A finished study of two evaluation documents of the many that its file has."""
    shutil.copytree(finished_once, tmp_path, dirs_exist_ok=True)
    return tmp_path, prompts(16)


def test_another_order_of_the_source_changes_nothing(study: tuple[Path, Rows]) -> None:
    """The rows are reversed, with new ones between."""
    folder, rows = study
    before = own_run(folder, rows)
    assert is_done(before)
    stored = values(before)
    after = own_run(folder, [row for pair in zip(prompts(32)[16:], rows[::-1], strict=True) for row in pair])
    assert named(after) == named(before)
    assert is_done(after)
    finish(after)
    assert values(after) == stored
    assert after.store.row_count("documents") == 4


def test_the_plan_has_the_documents_with_hashes_clusters_and_answers(study: tuple[Path, Rows]) -> None:
    run = own_run(*study)
    plan = find_plan(run.store, "own", "model")
    assert plan is not None
    assert plan.documents is not None
    for split in SPLITS:
        (frozen,) = plan.documents[split].values()
        assert [row["doc"] for row in frozen] == named(run)[split]
        for row, document in zip(frozen, run.material.of_split(split), strict=True):
            assert row["prompt_sha256"] == document.prompt_sha256
            assert (row["cluster"], row["answers"], row["scoring"]) == (document.cluster, [], None)


def test_new_documents_enter_behind_the_frozen_ones_by_a_revision(study: tuple[Path, Rows], tmp_path: Path) -> None:
    folder, rows = study
    frozen = named(own_run(folder, rows))
    more = (("evaluation = 2", "evaluation = 4"), ("\ndocuments = 2", "\ndocuments = 4"))
    grown = own_run(folder, rows[::-1], *more)
    said = [str(one) for one in check_agrees(grown)]
    assert said == ["evaluation documents of words: stored 2, asked 4", "plan.documents: frozen 2, asked 4"]
    assert named(grown)["development"] == frozen["development"]
    assert named(grown)["evaluation"][:2] == frozen["evaluation"]
    finish(grown)
    plan = find_plan(grown.store, "own", "model")
    assert plan is not None
    assert (plan.revision, plan.seen) == (1, True)
    assert [row["doc"] for row in (plan.documents or {})["evaluation"]["words"]] == named(grown)["evaluation"]
    assert is_done(own_run(folder, rows, *more)), "the file's own order gives the same documents"
    kept = [row for row in rows if any(row["id"] in own for own in named(grown).values())]
    fresh = own_run(tmp_path / "fresh", kept, *more)
    finish(fresh)
    views = ("moments", "decomposition")
    assert values(fresh, views) == values(grown, views)


@pytest.mark.slow
def test_documents_beyond_the_plan_wait_for_a_revision_that_takes_them(study: tuple[Path, Rows]) -> None:
    folder, rows = study
    finish(own_run(folder, rows, ("evaluation = 2", "evaluation = 3")))
    waiting = named(own_run(folder, rows, ("evaluation = 2", "evaluation = 3")))["evaluation"]
    reordered = own_run(folder, rows[::-1], ("evaluation = 2", "evaluation = 3"))
    assert named(reordered)["evaluation"] == waiting
    assert is_done(reordered)


@pytest.mark.parametrize("split", SPLITS)
def test_a_frozen_document_that_is_gone_is_named(study: tuple[Path, Rows], split: str) -> None:
    folder, rows = study
    gone = named(own_run(folder, rows))[split][0]
    run = own_run(folder, [row for row in rows if row["id"] != gone])
    line = refused(check_agrees, run)
    assert f"documents 'words': document '{gone}' of the stored study is gone from {folder / 'prompts.jsonl'}" in line
    assert "put it back, or give the changed study a new name" in line


def test_a_frozen_document_whose_prompt_changed_is_named(study: tuple[Path, Rows]) -> None:
    folder, rows = study
    changed = named(own_run(folder, rows))["evaluation"][1]
    edited = [row | {"prompt": row["prompt"] + " ban"} if row["id"] == changed else row for row in rows]
    line = refused(check_agrees, own_run(folder, edited[::-1]), error=PlanError)
    assert f"prompt of document '{changed}': stored " in line


def test_a_store_whose_plan_names_no_documents_keeps_those_that_it_has(study: tuple[Path, Rows]) -> None:
    """Earlier plans named no documents; then documents with units come first."""
    folder, rows = study
    before = own_run(folder, rows)
    documents, store = named(before), without_documents(before.store)
    assert find_plan(store, "own", "model").documents is None  # type: ignore[union-attr]
    reordered = own_run(folder, rows[::-1])
    assert {split: sorted(own) for split, own in named(reordered).items()} == {
        split: sorted(own) for split, own in documents.items()
    }
    assert not any(split.work for split in forecast(reordered).splits)


def without_documents(store: Store) -> Store:
    """Add a revision of the plan that does not name documents, as earlier releases made them."""
    row = store.read("plans").to_pylist()[-1]
    content = json.loads(row["plan"])
    del content["documents"]
    text = frozen_text(content | {"revision": 1, "seen": True})
    older = row | {"plan": text, "plan_sha256": frozen_sha256(text), "plan_revision": 1}
    store.append_rows("plans", pa.Table.from_pylist([older], schema=PLANS.schema))
    return store


def test_a_document_keeps_its_split_under_another_cluster(study: tuple[Path, Rows]) -> None:
    """The cluster decides the split only of new documents; a cluster that would be in both splits is refused."""
    folder, rows = study
    frozen = named(own_run(folder, rows))
    first, other = frozen["evaluation"][0], next(name for name in map(str, range(99)) if split_of(name) == SPLITS[0])
    moved = [row | {"cluster": other} if row["id"] == first else row for row in rows]
    assert named(own_run(folder, moved)) == frozen
    shared = [row | {"cluster": "both"} if row["id"] in {first, frozen["development"][0]} else row for row in rows]
    line = refused(lambda: own_run(folder, shared).material)
    assert f"cluster 'both' has development document '{frozen['development'][0]}' and evaluation document" in line
