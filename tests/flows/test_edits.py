"""A study edited at random over its finished store: the result is a fresh store's, or one line refuses the edit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.small_study import TEXT, finish, run_of
from fixtures.study_files import load_study

from flows.comparison import Kind, check_agrees, differences
from flows.revisions import redo_actions
from flows.study_run import StudyRun
from schema.errors import KvdriftError
from sql.catalog import open_views

pytestmark = pytest.mark.slow

SELECTOR = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from generator.attention.recording import PromptLayer
from generator.selectors.selector import ScoringSelector


@dataclass(frozen=True)
class Mine(ScoringSelector):
    """Scores by the size of the keys."""

    summary: ClassVar[str] = "the largest keys"

    def score(self, layer: PromptLayer) -> Tensor:
        return layer.key.float().norm(dim=-1)
'''
STUDY = TEXT.replace('selector = "recent"', 'selector = "mine:Mine"')
Edit = Callable[[str, str], tuple[str, str]]


def in_study(old: str, new: str) -> Edit:
    def edit(study: str, code: str) -> tuple[str, str]:
        assert old in study, old
        return study.replace(old, new, 1), code

    return edit


def more_documents(study: str, code: str) -> tuple[str, str]:
    """The plan of both strata grows too."""
    return study.replace("evaluation = 3", "evaluation = 5").replace("documents = 3", "documents = 5"), code


def other_order(study: str, code: str) -> tuple[str, str]:
    head, first, second = study.split("[[actions]]")
    second, plan = second.split("[plan]")
    return f"{head}[[actions]]{second}[[actions]]{first}[plan]{plan}", code


EDITS: dict[str, Edit] = {
    "seed": in_study("seed = 3", "seed = 4"),
    "keep": in_study('selector = "mine:Mine"\nkeep = "1/2"', 'selector = "mine:Mine"\nkeep = "1/4"'),
    "selector": in_study('selector = "mine:Mine"', 'selector = "recent"'),
    "code": lambda study, code: (study, code.replace("norm(dim=-1)", "abs().amax(dim=-1)")),
    "dtype": in_study('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\ndtype = "bfloat16"'),
    "documents": more_documents,
    "replicates": in_study("replicates = 5", "replicates = 7"),
    "order": other_order,
    "name": in_study('name = "small"', 'name = "other"'),
    "new action": in_study("[plan]", '[[actions]]\nname = "more"\nselector = "recent"\nkeep = 100\n\n[plan]'),
}


def written(folder: Path, study: str, code: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    (folder / "small.toml").write_text(study)
    return folder / "small.toml"


def values(run: StudyRun) -> dict[str, list[dict[str, object]]]:
    """What the store says of the study, but for when and in which order it was made, which moves sums' last bits."""
    left_out = {"action_revision", "path", "events_version", "plan_sha256", "status", "family"}
    left_out |= {"prefill_seconds", "decode_seconds"}
    views = ("events", "trajectories", "steps", "moments", "decomposition", "contrasts", "estimates")
    with open_views(run.store) as opened:
        found = {view: opened.rows(view, study=run.study.name).to_pylist() for view in views}
    return {
        view: [{name: rounded(value) for name, value in row.items() if name not in left_out} for row in rows]
        for view, rows in found.items()
    }


def rounded(value: object) -> object:
    return round(value, 12) if isinstance(value, float) else value


def refusal(run: StudyRun, redone: list[str]) -> str | None:
    """The line that refuses the study, None where it is taken."""
    try:
        check_agrees(run, redone)
    except KvdriftError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    finish(run_of(load_study(written(folder, STUDY, SELECTOR)), folder / "store"))
    return folder / "store"


GROWTH = {"documents", "replicates", "order", "new action"}
RANDOM = [random.Random(seed).sample(sorted(EDITS), 1 + seed % 2) for seed in range(12)]  # noqa: S311 - test data


@pytest.mark.parametrize("names", [*RANDOM, ["documents"], ["documents", "replicates"]], ids="-".join)
def test_an_edited_study_gives_a_fresh_stores_result_or_is_refused(
    base: Path, tmp_path: Path, names: list[str]
) -> None:
    study, code = STUDY, SELECTOR
    for name in names:
        study, code = EDITS[name](study, code)
    file = written(tmp_path / "edited", study, code)
    run = run_of(load_study(file), shutil.copytree(base, tmp_path / "store"))
    redone = sorted({one.action for one in differences(run) if one.kind is Kind.ACTION and one.action is not None})
    if (line := refusal(run, redone)) is not None:
        assert not set(names) <= GROWTH
        assert "asked" in line, names
        assert "\n" not in line
        return
    redo_actions([run], redone)
    finish(run)
    fresh = run_of(load_study(file), tmp_path / "fresh")
    finish(fresh)
    ours, theirs = values(run), values(fresh)
    if "new action" in names:  # a fresh store plans it too, at the levels of a larger family
        del ours["estimates"], theirs["estimates"]
    assert ours == theirs, names
