"""A file of prompts edited at random between runs: the store is one made at once of the same documents, or one line refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.own_files import prompts, write_own_study
from fixtures.refusals import refused
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study

from flows.comparison import check_agrees
from flows.study_run import StudyRun
from schema.document import SPLITS, split_of
from schema.errors import KvdriftError
from sql.catalog import open_views

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]
Move = Callable[[random.Random, Rows, set[str]], Rows]
SIZES = ("evaluation = {0}\n", "\ndocuments = {0}\n", "\nreplicates = {1}\n")
VIEWS = ("events", "scores", "moments", "decomposition", "answers", "document_answers", "estimates")
EVALUATION_CLUSTERS = [name for name in map(str, range(40)) if split_of(name) == "evaluation"]


def answers(draws: random.Random, rows: Rows, _: set[str]) -> Rows:
    """Some rows get an answer that continuations may state, or lose theirs."""
    given = [["k00"], ["v01 v02", "k03"], []]
    return [row | {"answers": draws.choice(given)} if draws.random() < 0.5 else row for row in rows]


def clusters(draws: random.Random, rows: Rows, taken: set[str]) -> Rows:
    """Two evaluation documents share a cluster, or another pair does."""
    shared = draws.sample(sorted(row["id"] for row in rows if row["id"] in taken), 2)
    cluster = draws.choice(EVALUATION_CLUSTERS)
    return [row | {"cluster": cluster} if row["id"] in shared else row for row in rows]


def gone(draws: random.Random, rows: Rows, taken: set[str]) -> Rows:
    left_out = draws.choice(sorted(taken))
    return [row for row in rows if row["id"] != left_out]


def changed_prompt(draws: random.Random, rows: Rows, taken: set[str]) -> Rows:
    edited = draws.choice(sorted(taken))
    return [row | {"prompt": row["prompt"] + " ban"} if row["id"] == edited else row for row in rows]


MOVES: dict[str, Move] = {
    "order": lambda draws, rows, _: draws.sample(rows, len(rows)),
    "in front": lambda draws, rows, _: [*(row | {"id": f"n{draws.random()}"} for row in prompts(60)[30:36]), *rows],
    "answers": answers,
    "scoring": lambda draws, rows, _: [row | {"scoring": draws.choice(["all", "part"])} for row in rows],
    "clusters": clusters,
    "documents": lambda _, rows, __: rows,  # the study asks for more
    "replicates": lambda _, rows, __: rows,
    "gone": gone,
    "prompt": changed_prompt,
}
REFUSED = {"gone", "prompt"}


def own_run(folder: Path, rows: Rows, documents: int, replicates: int) -> StudyRun:
    folder.mkdir(exist_ok=True)
    sizes = [(old.format(2, 2), old.format(documents, replicates)) for old in SIZES]
    return run_of(load_study(write_own_study(folder, rows, *sizes)), folder / "store")


def values(run: StudyRun) -> dict[str, Rows]:
    """What the store says of the study, but for when it was made and what its plan knew beforehand."""
    left_out = {"events_version", "plan_sha256", "status", "document_revision"}
    with open_views(run.store) as opened:
        rows = {view: opened.rows(view, study="own").to_pylist() for view in VIEWS}
    return {view: [{k: rounded(v) for k, v in row.items() if k not in left_out} for row in own]
            for view, own in rows.items()}  # fmt: skip


def rounded(value: object) -> object:
    return round(value, 12) if isinstance(value, float) else value


@pytest.mark.parametrize("seed", range(8))
def test_a_source_that_is_edited_night_by_night_gives_a_fresh_stores_result(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)  # noqa: S311 - test data
    rows, documents, replicates, folder = prompts(30), 2, 2, tmp_path / "edited"
    run = own_run(folder, rows, documents, replicates)
    finish(run)
    for name in draws.sample(sorted(MOVES), 4):
        taken = {document.doc for split in SPLITS for document in run.material.of_split(split)}
        evaluated = {document.doc for document in run.material.of_split("evaluation")}
        edited = MOVES[name](draws, rows, evaluated if name == "clusters" else taken)
        documents, replicates = documents + (name == "documents"), replicates + (name == "replicates")
        later = own_run(folder, edited, documents, replicates)
        if name in REFUSED:
            refused(check_agrees, later, error=KvdriftError)
            continue
        finish(later)
        assert taken <= {document.doc for split in SPLITS for document in later.material.of_split(split)}
        rows, run = edited, later
    taken = {document.doc for split in SPLITS for document in run.material.of_split(split)}
    kept = [row for row in rows if row["id"] in taken]
    fresh = own_run(tmp_path / "fresh", kept, documents, replicates)
    finish(fresh)
    assert values(run) == values(fresh)
