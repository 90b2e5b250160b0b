"""Compare a study file with a finished store: refusals, growth, and the lines about them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.small_study import ADDED_ACTION, TEXT, run_of, write_study
from fixtures.study_files import load_study

from flows.run.comparison import check_agrees
from flows.run.differences import Difference, Kind, differences
from flows.run.study_run import StudyRun
from log.store import Store
from schema.errors import PlanError
from schema.tables import ACTIONS

KEEP = 'selector = "recent"\nkeep = "1/2"'


def changed(folder: Path, store: Path, *changes: tuple[str, str]) -> StudyRun:
    return run_of(load_study(write_study(folder, *changes)), store)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("seed = 3", "seed = 4"), "study.seed: stored 3, asked 4; give the changed study a new name"),
        (("horizon = 12", "horizon = 13"), "study.horizon: stored 12, asked 13"),
        (
            ("seed = 3", "seed = 3\ntemperature = 0.7\ntop_p = 0.9"),
            "study.temperature: stored 1.0, asked 0.7; study.top_p: stored none, asked 0.9; give the changed",
        ),
        (
            ('id = "kvdrift/tiny"', 'id = "kvdrift/tiny"\ndtype = "bfloat16"'),
            "model.dtype: stored float32, asked bfloat16",
        ),
        (('stratum = "needle"', 'stratum = "hay"'), r"documents\[0\].stratum: stored needle, asked hay"),
        (("length = 384", "length = 448"), r"documents\[0\].length: stored 384, asked 448"),
        (("development = 2", "development = 3"), "development documents of needle: stored 2, asked 3"),
        (("evaluation = 3", "evaluation = 2"), "evaluation documents of needle: stored 3, asked 2"),
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
        ((KEEP, 'selector = "recent"\nkeep = "1/4"'), "keep of action 'recent-half': stored 1/2, asked 1/4 (10 units)"),
        (
            (KEEP, 'selector = "h2o"\nkeep = "1/2"'),
            "selector of action 'recent-half': stored recent, asked h2o (10 units)",
        ),
        ((KEEP, KEEP + "\nsinks = 2"), "sinks of action 'recent-half': stored 4, asked 2 (10 units)"),
    ],
)
def test_a_changed_action_names_the_command_that_redoes_it(
    finished: Path, tmp_path: Path, change: tuple[str, str], line: str
) -> None:
    run = changed(tmp_path, finished, change)
    with pytest.raises(PlanError) as caught:
        check_agrees(run)
    assert line in str(caught.value)
    assert "kvdrift run --redo recent-half generates them again" in str(caught.value)
    assert check_agrees(run, ["recent-half"]) == []


def test_what_is_added_is_growth(finished: Path, tmp_path: Path) -> None:
    run = changed(tmp_path, finished, ADDED_ACTION, ("evaluation = 3", "evaluation = 5"))
    documents, action = check_agrees(run)
    note = "; the plan keeps N = 3, a larger plan.documents takes more"
    assert documents == Difference(Kind.GROWTH, "evaluation documents of needle", "3", "5", note=note)
    assert str(action) == "action 'snapkv-100': stored none, asked to be generated"


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
    assert [(one.what, one.stored, one.asked) for one in differences(run_of(load_study(file), finished))] == [
        ("documents[1].length", "384", "512")
    ]
