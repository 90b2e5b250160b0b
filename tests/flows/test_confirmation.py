"""Which documents and actions count as seen, and ``kvdrift confirm``, whose study takes documents that nobody saw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.command import call
from fixtures.small_study import ADDED_ACTION, run_of, write_study
from fixtures.stored_units import HORIZON, make_unit
from fixtures.study_files import load_study

from kvdrift.flows import material
from kvdrift.flows.material import gather_material
from kvdrift.flows.plan.confirmation import write_confirmation
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.plan.making import freeze_plan
from kvdrift.flows.plan.stored_documents import SeenDocuments, seen_actions
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_actions
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import ACTIONS, DOCUMENTS, STUDIES

RENAMED = ('name = "small"', 'name = "other"')


def document(doc: str, cluster: str, source: str, tokens: tuple[int, ...] = (1, 2)) -> Document:
    return Document(doc, "all", cluster, "", source, tokens)


def stored(folder: Path, *given: Document, split: str = "evaluation") -> Store:
    """A store whose study s, of seed 3, has units of documents."""
    store = Store.create(folder)
    study: dict[str, Any] = dict.fromkeys(STUDIES.columns, 1) | {"study": "s", "model": "org/model", "seed": 3}
    study |= {"horizon": HORIZON}
    study |= {"study_sha256": "", "revision": None, "settings": None}
    store.append_rows("studies", pa.Table.from_pylist([study], schema=STUDIES.schema))
    rows = [
        dict.fromkeys(DOCUMENTS.columns) | DOCUMENTS.defaults | {"study": "s", "model": "org/model", "split": split}
        | {name: getattr(one, name) for name in ("doc", "cluster", "stratum", "source", "prompt_tokens", "prompt_sha256")}
        for one in given
    ]  # fmt: skip
    store.append_rows("documents", pa.Table.from_pylist(rows, schema=DOCUMENTS.schema))
    store.append_units([make_unit(one.doc) for one in given])
    return store


def test_what_a_confirmation_plans_was_not_seen(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explored = write_study(tmp_path, ADDED_ACTION)
    code, out, err = call(capsys, "confirm", explored, "--action", "snapkv-100", "--store", copied)
    path = tmp_path / "small-confirm.toml"
    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: study 'small-confirm' of snapkv-half, snapkv-100 with seed 4; ")
    assert out.endswith(f"kvdrift run {path} --store {copied} --plan-only\n")
    text = path.read_text()
    assert f"#   kvdrift run {path} --store {copied}\n" in text
    run = run_of(load_study(path), copied)
    assert [action.name for action in run.study.actions] == ["snapkv-half", "snapkv-100"]
    explored_study = load_study(explored)
    assert (run.study.plan, run.study.model) == (explored_study.plan, explored_study.model)
    first = find_plan(run.store, "small", "kvdrift/tiny")
    assert first is not None
    content = first.content | {"actions": ["snapkv-half", "snapkv-100"]}
    assert not freeze_plan(run.store, run.material, content, run.store.version("events")).seen
    code, _, err = call(capsys, "confirm", explored, "--action", "snapkv-100", "--store", copied)
    assert (code, err.startswith(f"kvdrift: {path}: is there already")) == (2, True)
    assert path.read_text() == text


def test_an_unknown_action_is_named(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--action snapkv-hal: .* 'snapkv-half'\?"):
        write_confirmation(write_study(tmp_path), ["snapkv-hal"], Store.open(finished))


def test_the_baseline_alone_confirms_no_difference(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--action snapkv-half: .* recent-half"):
        write_confirmation(write_study(tmp_path), ["snapkv-half"], Store.create(tmp_path / "store"))


class Bytes:
    """A tokenizer whose tokens are a text's bytes."""

    chat_template = bos_token_id = None
    added_tokens_decoder: Mapping[int, Any] = {}

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def prompts_study(folder: Path, rows: int) -> Path:
    """Return the small study with one stratum read from a file, in which two rows share each cluster."""
    lines: list[dict[str, Any]] = [
        {"id": f"r{number}", "cluster": f"question {number // 2}", "prompt": f"{number:03d} " * 60}
        for number in range(rows)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_study(folder).read_text()
    begin, end = text.index("[[documents]]"), text.index("[[actions]]")
    stratum = f'[[documents]]\nsource = "jsonl"\npath = "{folder}/prompts.jsonl"\nlength = 400\ndevelopment = 2\n'
    path = folder / "prompts.toml"
    path.write_text(text[:begin] + stratum + "evaluation = 3\n\n" + text[end:])
    return path


def test_clusters_of_files_that_were_seen_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "load_prompt_tokenizer", lambda _: Bytes())
    study = prompts_study(tmp_path, 40)
    seen = gather_material(load_study(study)).of_split("evaluation")
    store = stored(tmp_path / "store", *seen)
    made = write_confirmation(study, ["recent-half"], store)
    confirming = load_study(made.path)
    fresh = gather_material(confirming).of_split("evaluation")
    assert made.documents == len(fresh) == 3
    assert SeenDocuments.in_store(store).among(fresh, confirming.study.seed) == []
    assert {one.cluster for one in seen} <= set(
        json.loads((tmp_path / "small-confirm-exclude.json").read_text())["clusters"]
    )
    # A prompt that was seen under another cluster's name.
    again = stored(tmp_path / "again", *seen, Document("x", "all", "elsewhere", "", "jsonl", fresh[0].tokens))
    third = load_study(write_confirmation(study, ["recent-half"], again, tmp_path / "third.toml").path)
    third_documents = gather_material(third).of_split("evaluation")
    assert len(third_documents) == 3
    assert {one.cluster for one in third_documents}.isdisjoint({one.cluster for one in [*seen, fresh[0]]})
    with pytest.raises(InputError, match=r"evaluation = 3, .* 4 cluster\(s\)"):
        write_confirmation(prompts_study(tmp_path, 10), ["recent-half"], again, tmp_path / "few.toml")
    assert not (tmp_path / "few.toml").exists()


def test_a_table_of_an_action_is_written_as_one(tmp_path: Path) -> None:
    codec = 'codec = { name = "int4", group = 64 }'
    text = write_study(tmp_path).read_text()
    assert "[[actions]]" in text
    study = tmp_path / "coded.toml"
    study.write_text(f'{text}\n[[actions]]\nname = "coded"\n{codec}\nselector = "recent"\nkeep = "1/2"\n')
    made = write_confirmation(study, ["coded"], Store.create(tmp_path / "store"), tmp_path / "new.toml")
    (action,) = (one for one in load_study(made.path).actions if one.name == "coded")
    assert action.codec == {"name": "int4", "group": 64}


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


def test_development_documents_of_another_study_confirm_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small file, a document for development of one study may be for evaluation of another one."""
    monkeypatch.setattr(material, "load_prompt_tokenizer", lambda _: Bytes())
    study = prompts_study(tmp_path, 40)
    developed = gather_material(load_study(study)).of_split("evaluation")
    store = stored(tmp_path / "store", *developed, split="development")
    seen = SeenDocuments.in_store(store)
    assert seen.among(developed, 3) == developed
    assert seen.clusters == set(), "they may be for development again"
    fresh = gather_material(load_study(write_confirmation(study, ["recent-half"], store).path)).of_split("evaluation")
    assert len(fresh) == 3
    assert {one.cluster for one in fresh}.isdisjoint({one.cluster for one in developed})
