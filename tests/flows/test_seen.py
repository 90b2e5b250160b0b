"""Which evaluation documents and actions count as seen before a plan."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.seen_documents import document, stored
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study

from flows.plan.freezing import freeze_plan
from flows.plan.frozen_plan import find_plan
from flows.plan.seen import SeenDocuments, seen_actions
from log.store import Store
from log.units.revisions import current_actions
from schema.document import Document
from schema.tables import ACTIONS

RENAMED = ('name = "small"', 'name = "other"')


@pytest.mark.parametrize(("changes", "seen"), [((RENAMED,), True), ((RENAMED, ("seed = 3", "seed = 4")), False)])
def test_a_plan_knows_whether_another_study_saw_its_documents(
    copied: Path, tmp_path: Path, changes: tuple[tuple[str, str], ...], *, seen: bool
) -> None:
    run = run_of(load_study(write_study(tmp_path, *changes)), copied)
    first = find_plan(run.store, "small", "kvdrift/tiny")
    assert first is not None
    assert not first.seen
    plan = freeze_plan(run.store, run.material, first.content, run.store.version("events"))
    assert plan.seen == seen
    assert (plan.sha256 != first.sha256) == seen
    assert seen_actions(run.store, plan) == (("snapkv-half", "recent-half") if seen else ())
    assert seen_actions(run.store, first) == ()


def test_an_action_that_was_redone_was_seen(copied: Path) -> None:
    store = Store.open(copied)
    plan = find_plan(store, "small", "kvdrift/tiny")
    assert plan is not None
    row = current_actions(store.read("actions"), "small")["recent-half"] | {"action_revision": 1}
    store.append_rows("actions", pa.Table.from_pylist([row], schema=ACTIONS.schema))
    assert seen_actions(store, plan) == ("recent-half",)


@pytest.mark.parametrize(
    ("one", "other", "seed", "same"),
    [
        (document("a", "a", "jsonl"), document("b", "b", "jsonl"), 9, True),  # the same prompt
        (document("a", "q", "helmet"), document("b", "q", "helmet", (7,)), 9, True),  # the same question
        (document("a", "q", "helmet"), document("b", "r", "helmet", (7,)), 9, False),
        (document("needle-1", "needle-1", "embedded"), document("needle-1", "needle-1", "embedded", (7,)), 9, False),
        (document("needle-1", "needle-1", "embedded"), document("needle-1", "needle-1", "embedded", (7,)), 3, True),
        (document("system-1", "system-1", "finite-state", ()), document("x", "x", "finite-state", ()), 3, False),
        (document("system-1", "system-1", "finite-state", ()), document("system-1", "system-1", "finite-state", ()), 3, True),
    ],
)  # fmt: skip
def test_a_document_is_the_same_by_its_prompt_or_its_cluster(
    tmp_path: Path, one: Document, other: Document, seed: int, *, same: bool
) -> None:
    store = stored(tmp_path / "store", one)
    assert SeenDocuments.in_store(store).among([other], seed) == ([other] if same else [])
    assert SeenDocuments.in_store(store, without="s").among([other], seed) == []


def test_development_documents_were_not_seen(tmp_path: Path) -> None:
    one = document("a", "a", "jsonl")
    assert SeenDocuments.in_store(stored(tmp_path / "development", one, split="development")).traits == frozenset()
