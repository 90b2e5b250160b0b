"""A study and its prompts edited at random, six times over: the store is one made at once, or one line refuses an edit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.own_files import prompts, write_own_study
from fixtures.own_selectors import UNSEEN
from fixtures.refusals import refused
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study

from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import Kind, check_agrees, differences, redo_actions
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun
from kvdrift.schema.document import SPLITS, split_of
from kvdrift.schema.errors import KvdriftError, UnlikeUnitsError
from kvdrift.sql.catalog import open_views

pytestmark = pytest.mark.slow

VIEWS = (
    "events", "trajectories", "steps", "scores", "moments", "decomposition", "contrasts", "answers", "document_answers",
    "estimates",
)  # fmt: skip
EVALUATION_CLUSTERS = [name for name in map(str, range(40)) if split_of(name) == "evaluation"]


@dataclass
class Edited:
    """A study file, its prompts and its own selector, as they are after some edits."""

    name: str = "own"
    seed: int = 3
    dtype: str = "float32"
    evaluation: int = 2
    replicates: int = 2
    keep: str = "1/2"
    selector: str = "mine:Mine"
    added: bool = False
    swapped: bool = False
    code: str = UNSEEN
    rows: list[dict[str, Any]] = field(default_factory=lambda: prompts(30))

    def run(self, folder: Path, store: Path, **options: Any) -> StudyRun:
        """Write the files to a folder and return a run of them."""
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(self.code)
        names = ["mine", "recent-half"] + ["more"] * self.added
        bodies = {
            "mine": f'selector = "{self.selector}"\nkeep = "{self.keep}"',
            "recent-half": 'selector = "recent"\nkeep = "1/2"',
            "more": 'selector = "recent"\nkeep = 12',
        }
        actions = [f'[[actions]]\nname = "{name}"\n{bodies[name]}\n' for name in names[:: -1 if self.swapped else 1]]
        changes = [
            ('name = "own"', f'name = "{self.name}"'),
            ("seed = 3", f"seed = {self.seed}"),
            ('id = "model"', f'id = "model"\ndtype = "{self.dtype}"'),
            ("evaluation = 2", f"evaluation = {self.evaluation}"),
            ("\ndocuments = 2", f"\ndocuments = {self.evaluation}"),
            ("\nreplicates = 2", f"\nreplicates = {self.replicates}"),
            ('[[actions]]\nname = "recent-half"\nselector = "recent"\nkeep = "1/2"\n', "\n".join(actions)),
        ]
        return replace(run_of(load_study(write_own_study(folder, self.rows, *changes)), store), **options)


Move = Callable[[random.Random, Edited, set[str]], None]


def set_to(**value: Any) -> Move:
    return lambda _draws, edited, _taken: vars(edited).update(value)


def more(name: str) -> Move:
    return lambda _draws, edited, _taken: setattr(edited, name, getattr(edited, name) + 1)


def rewritten(rewrite: Callable[[random.Random, list[dict[str, Any]], set[str]], list[dict[str, Any]]]) -> Move:
    return lambda draws, edited, taken: setattr(edited, "rows", rewrite(draws, edited.rows, taken))


def new_answers(draws: random.Random, rows: list[dict[str, Any]], _: set[str]) -> list[dict[str, Any]]:
    given = [["k00"], ["v01 v02", "k03"], []]
    return [row | {"answers": draws.choice(given)} if draws.random() < 0.5 else row for row in rows]


def new_clusters(draws: random.Random, rows: list[dict[str, Any]], taken: set[str]) -> list[dict[str, Any]]:
    """Two evaluation documents share a cluster, which is of their split."""
    shared = draws.sample(sorted(taken), 2)
    cluster = draws.choice(EVALUATION_CLUSTERS)
    return [row | {"cluster": cluster} if row["id"] in shared else row for row in rows]


def in_front(draws: random.Random, rows: list[dict[str, Any]], _: set[str]) -> list[dict[str, Any]]:
    return [*(row | {"id": f"n{draws.random()}"} for row in prompts(60)[30:36]), *rows]


def gone(draws: random.Random, rows: list[dict[str, Any]], taken: set[str]) -> list[dict[str, Any]]:
    left_out = draws.choice(sorted(taken))
    return [row for row in rows if row["id"] != left_out]


def new_prompt(draws: random.Random, rows: list[dict[str, Any]], taken: set[str]) -> list[dict[str, Any]]:
    changed = draws.choice(sorted(taken))
    return [row | {"prompt": row["prompt"] + " ban"} if row["id"] == changed else row for row in rows]


MOVES: dict[str, Move] = {
    "seed": set_to(seed=4),
    "dtype": set_to(dtype="bfloat16"),
    "gone": rewritten(gone),
    "prompt": rewritten(new_prompt),
    "environment": more("replicates"),  # first with another variable than the stored units were made with
    "keep": set_to(keep="1/4"),
    "selector": set_to(selector="keydiff"),
    "code": lambda _, edited, __: setattr(edited, "code", edited.code.replace("norm(dim=-1)", "abs().amax(dim=-1)")),
    "name": set_to(name="other"),
    "action": set_to(added=True),
    "action order": set_to(swapped=True),
    "documents": more("evaluation"),
    "replicates": more("replicates"),
    "interrupted": more("replicates"),  # after one document
    "redo": lambda *_: None,
    "order": rewritten(lambda draws, rows, _: draws.sample(rows, len(rows))),
    "in front": rewritten(in_front),
    "answers": rewritten(new_answers),
    "scoring": rewritten(lambda draws, rows, _: [row | {"scoring": draws.choice(["all", "part"])} for row in rows]),
    "clusters": rewritten(new_clusters),
}
REFUSED = {"seed", "dtype", "gone", "prompt"}


def carry_out(name: str, run: StudyRun, monkeypatch: pytest.MonkeyPatch, *, hidden: bool = False) -> None:
    """Run an edited study as its user would: changed actions are redone, and an added action is planned.

    ``hidden`` says that an action of the study reads the variable.

    Raises:
        KvdriftError: The edit is refused.
    """
    redone = {one.action for one in differences(run) if one.kind is Kind.ACTION and one.action is not None}
    redone |= {"recent-half"} if name == "redo" else set()
    run = replace(run, replan=name == "action")
    check_agrees(run, sorted(redone))
    redo_actions([run], sorted(redone))
    if name == "interrupted":
        finish_part(replace(run, limit=DocumentLimit(1)))
    if name == "environment" and hidden:
        with monkeypatch.context() as patch:
            patch.setenv("COORDINATE", "1")
            refused(finish, run, error=UnlikeUnitsError)
    finish(run)


def finish_part(run: StudyRun) -> None:
    """Do the work of a run that is stopped after one document."""
    for stage in (stages.prepare, stages.plan, stages.evaluate):
        stage(run)


def documents_of(run: StudyRun, *splits: str) -> set[str]:
    return {document.doc for split in splits for document in run.material.of_split(split)}


def values(run: StudyRun) -> dict[str, list[dict[str, object]]]:
    """Return the study's stored values without numbers of units, and the time and order of making, which move last bits."""
    left_out = {
        "action_revision", "baseline_revision", "document_revision", "path", "events_version", "plan_sha256", "status",
        "prefill_seconds", "decode_seconds", "unit",
    }  # fmt: skip
    with open_views(run.store) as opened:
        found = {view: opened.rows(view, study=run.study.name).to_pylist() for view in VIEWS}
    return {
        view: [{name: rounded(value) for name, value in row.items() if name not in left_out} for row in rows]
        for view, rows in found.items()
    }


def rounded(value: object) -> object:
    return round(value, 12) if isinstance(value, float) else value


@pytest.mark.parametrize("seed", range(24))
def test_six_edits_give_a_fresh_stores_result_or_are_refused(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)  # noqa: S311 - test data
    edited, store = Edited(), tmp_path / "store"
    run = edited.run(tmp_path / "edited", store)
    finish(run)
    for name in draws.sample(sorted(MOVES), 6):
        taken = documents_of(run, *SPLITS)
        before = copy.deepcopy(edited)
        MOVES[name](draws, edited, documents_of(run, "evaluation") if name == "clusters" else taken)
        later = edited.run(tmp_path / "edited", store)
        if name in REFUSED:
            with pytest.raises(KvdriftError) as caught:
                carry_out(name, later, monkeypatch)
            assert "\n" not in str(caught.value)
            assert caught.value.exit_code == 2
            edited = before
            run = edited.run(tmp_path / "edited", store)
            continue
        carry_out(name, later, monkeypatch, hidden=edited.selector == "mine:Mine")
        assert edited.name != before.name or taken <= documents_of(later, *SPLITS)
        run = later
    edited.rows = [row for row in edited.rows if row["id"] in documents_of(run, *SPLITS)]
    fresh = edited.run(tmp_path / "fresh", tmp_path / "made at once")
    finish(fresh)
    assert values(run) == values(fresh)
