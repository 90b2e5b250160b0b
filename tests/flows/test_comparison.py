"""Compare a study file with a finished store: refusals, growth, the lines about them, and the documents that a plan froze."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.own_files import prompts, write_own_study
from fixtures.refusals import refused
from fixtures.small_study import ADDED_ACTION, TEXT, finish, run_of, write_study
from fixtures.study_files import load_study

from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import Difference, Kind, check_agrees, differences
from kvdrift.flows.run.study_run import StudyRun, forecast
from kvdrift.log.store import Store
from kvdrift.schema.document import SPLITS, split_of
from kvdrift.schema.errors import PlanError
from kvdrift.schema.tables import ACTIONS

KEEP = 'selector = "recent"\nkeep = "1/2"'


def changed(folder: Path, store: Path, *changes: tuple[str, str]) -> StudyRun:
    return run_of(load_study(write_study(folder, *changes)), store)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            ("seed = 3", "seed = 3\ntemperature = 0.7\ntop_p = 0.9"),
            "study.temperature: stored 1.0, requested 0.7; study.top_p: stored none, requested 0.9",
        ),
        (("length = 384", "length = 448"), r"documents\[0\].length: stored 384, requested 448"),
        (("development = 2", "development = 3"), "development documents of needle: stored 2, requested 3"),
        (("evaluation = 3", "evaluation = 2"), "evaluation documents of needle: stored 3, requested 2"),
    ],
)
def test_a_changed_setting_is_refused(finished: Path, tmp_path: Path, change: tuple[str, str], line: str) -> None:
    changes = [change, ("documents = 3", "documents = 2")] if "evaluation = 2" in change[1] else [change]
    with pytest.raises(PlanError, match=f"^study 'small' differs from its store: .*{line}") as caught:
        check_agrees(changed(tmp_path, finished, *changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            (KEEP, 'selector = "recent"\nkeep = "1/4"'),
            "keep of action 'recent-half': stored 1/2, requested 1/4 (10 units)",
        ),
        ((KEEP, KEEP + "\nsinks = 2"), "sinks of action 'recent-half': stored 4, requested 2 (10 units)"),
    ],
)
def test_a_changed_action_names_the_command_that_redoes_it(
    finished: Path, tmp_path: Path, change: tuple[str, str], line: str
) -> None:
    run = changed(tmp_path, finished, change)
    with pytest.raises(PlanError) as caught:
        check_agrees(run)
    assert line in str(caught.value)
    assert "kvdrift run --redo recent-half " in str(caught.value)
    assert check_agrees(run, ["recent-half"]) == []


def test_what_is_added_is_growth(finished: Path, tmp_path: Path) -> None:
    run = changed(tmp_path, finished, ADDED_ACTION, ("evaluation = 3", "evaluation = 5"))
    documents, action = check_agrees(run)
    note = "; the plan keeps N = 3, a larger plan.documents takes more"
    assert documents == Difference(Kind.GROWTH, "evaluation documents of needle", "3", "5", note=note)
    assert (action.kind, action.action, action.stored) == (Kind.GROWTH, "snapkv-100", "none")


def test_an_action_that_left_the_file_is_named(copied: Path, tmp_path: Path) -> None:
    row = dict.fromkeys(ACTIONS.columns) | {"study": "small", "action": "gone", "selector": "recent", "keep": "4"}
    row |= {"position_mode": "on", "control": False, "prespecified": False, "action_revision": 0, "dropped": False}
    Store.open(copied).append_rows("actions", pa.Table.from_pylist([row], schema=ACTIONS.schema))
    with pytest.raises(PlanError, match=f"kvdrift drop {copied} --action gone drops it"):
        check_agrees(changed(tmp_path, copied))


def test_nothing_differs_where_nothing_changed(finished: Path, tmp_path: Path) -> None:
    assert differences(changed(tmp_path, finished)) == []
    assert differences(changed(tmp_path, tmp_path / "none")) == []


def test_the_order_of_document_sections_decides_nothing(finished: Path, tmp_path: Path) -> None:
    head, first, second = TEXT.split("[[documents]]")
    second, actions = second.split("[[actions]]", 1)
    swapped = f"{head}[[documents]]{second}[[documents]]{first}[[actions]]{actions}"
    file = tmp_path / "swapped.toml"
    file.write_text(swapped)
    assert differences(run_of(load_study(file), finished)) == []
    file.write_text(swapped.replace("length = 384", "length = 512", 1))
    assert [(one.what, one.stored, one.requested) for one in differences(run_of(load_study(file), finished))] == [
        ("documents[1].length", "384", "512")
    ]


Rows = list[dict[str, Any]]


def own_run(folder: Path, rows: Rows, *changes: tuple[str, str]) -> StudyRun:
    """A run of the study of some prompts, in the folder's store."""
    folder.mkdir(exist_ok=True)
    return run_of(load_study(write_own_study(folder, rows, *changes)), folder / "store")


def named(run: StudyRun) -> dict[str, list[str]]:
    return {split: [one.doc for one in run.material.of_split(split)] for split in SPLITS}


def is_done(run: StudyRun) -> bool:
    """Whether the run would generate, derive, plan and estimate nothing; the page is no part of these tests."""
    found = forecast(run)
    work = [split.work for split in found.splits]
    return (
        not check_agrees(run) and not any(work) and not found.underived and found.estimated and stages.is_planned(run)
    )


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


def test_rows_that_come_later_move_no_document_of_a_small_file(tmp_path: Path) -> None:
    """By hash all four rows are for evaluation; with the others, the hashes alone would give both splits enough."""
    evaluation = [name for name in map(str, range(99)) if split_of(name) == "evaluation"]
    development = [name for name in map(str, range(99)) if split_of(name) == "development"]
    ids = [*evaluation[:4], *development[:4], *evaluation[4:8]]
    rows = [row | {"id": name} for row, name in zip(prompts(12), ids, strict=True)]
    folder = tmp_path / "small"
    first = own_run(folder, rows[:4])
    assert sorted(name for own in named(first).values() for name in own) == sorted(ids[:4])
    stages.prepare(first)
    before, after = named(first), named(own_run(folder, rows[::-1]))
    assert all(set(after[split]) == set(before[split]) for split in SPLITS), "only a plan keeps their order"
    moved = named(first)["development"][0]
    edited = [row | {"split": "evaluation"} if row["id"] == moved else row for row in rows]
    line = refused(lambda: own_run(folder, edited).material)
    assert f"document '{moved}' is of the stored study" in line


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


@pytest.mark.slow
def test_new_documents_enter_behind_the_frozen_ones_by_a_revision(study: tuple[Path, Rows]) -> None:
    """``test_edits.py`` compares such a store with one made at once."""
    folder, rows = study
    frozen = named(own_run(folder, rows))
    more = (("evaluation = 2", "evaluation = 4"), ("\ndocuments = 2", "\ndocuments = 4"))
    grown = own_run(folder, rows[::-1], *more)
    said = [str(one) for one in check_agrees(grown)]
    assert said == ["evaluation documents of words: stored 2, requested 4", "plan.documents: frozen 2, requested 4"]
    assert named(grown)["development"] == frozen["development"]
    assert named(grown)["evaluation"][:2] == frozen["evaluation"]
    finish(grown)
    plan = find_plan(grown.store, "own", "model")
    assert plan is not None
    assert (plan.revision, plan.seen) == (1, True)
    assert [row["doc"] for row in (plan.documents or {})["evaluation"]["words"]] == named(grown)["evaluation"]
    assert is_done(own_run(folder, rows, *more)), "the file's own order gives the same documents"


@pytest.mark.parametrize("split", SPLITS)
def test_a_frozen_document_that_is_gone_is_named(study: tuple[Path, Rows], split: str) -> None:
    folder, rows = study
    gone = named(own_run(folder, rows))[split][0]
    run = own_run(folder, [row for row in rows if row["id"] != gone])
    line = refused(check_agrees, run)
    assert line.startswith(f"documents 'words': document '{gone}' ")
    assert str(folder / "prompts.jsonl") in line


def test_a_frozen_document_whose_prompt_changed_is_named(study: tuple[Path, Rows]) -> None:
    folder, rows = study
    changed = named(own_run(folder, rows))["evaluation"][1]
    edited = [row | {"prompt": row["prompt"] + " ban"} if row["id"] == changed else row for row in rows]
    line = refused(check_agrees, own_run(folder, edited[::-1]), error=PlanError)
    assert f"prompt of document '{changed}': stored " in line


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
