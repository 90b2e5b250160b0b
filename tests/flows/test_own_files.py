"""A user's model folder and file of prompts: refusals, and remarks of a run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.command import call, mistake
from fixtures.finite_study import write_finite_study
from fixtures.heard import Heard
from fixtures.own_files import prompts, write_own_study
from fixtures.refusals import refused
from fixtures.report_views import check as check_page
from fixtures.small_study import finish, run_of, write_study
from fixtures.study_files import load_study
from safetensors.numpy import load_file, save_file

from kvdrift.flows.run import stages
from kvdrift.flows.run import study as study_files
from kvdrift.flows.run.checks import check_study, remarks
from kvdrift.generator.documents.jsonl import left_out
from kvdrift.report.figures.canvas import save
from kvdrift.schema.document import SPLITS, split_of
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import load_studies

OTHERS = ("no stratum", "words", "names", "words", "dates", "names", "no stratum", "words")


def of_strata(count: int) -> list[dict[str, Any]]:
    """Rows that name strata in turn, or none."""
    rows = prompts(count)
    for number, row in enumerate(rows):
        if (named := OTHERS[number % len(OTHERS)]) != "no stratum":
            row["stratum"] = named
    return rows


def said(study: Path) -> list[str]:
    """Return the remarks of a run about a study file that it does not refuse."""
    runs = [run_of(one, study.parent / "store") for one in load_studies(study)]
    for run in runs:
        check_study(run)
    return remarks(runs)


def test_rows_of_strata_that_no_section_names_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however many laws or models the file has; by a run and by --dry-run."""
    study = write_own_study(tmp_path, of_strata(80), ("seed = 3", "seed = 3\ntemperature = [0.7, 1.0]"))
    line = (
        f"{tmp_path / 'prompts.jsonl'}: 30 of 80 rows are left out, of strata that no [[documents]] section of the "
        "file has: 'names' (20), 'dates' (10)"
    )
    code, out, err = call(capsys, "run", study, "--dry-run")
    assert (code, err, out.splitlines()[0], out.count(line)) == (0, "", line, 1)
    heard = Heard()
    monkeypatch.setattr(study_files, "run_studies", lambda *_, **__: heard.say("runs"))
    study_files.run_file(load_studies(study), tmp_path / "store", None, heard)
    assert heard.lines == [line, "runs"]


def test_control_tokens_in_texts_are_named(tmp_path: Path) -> None:
    """ggml-org/llama.cpp 7332 warns of a BOS alike: in one line, with the first document and the counts."""
    rows = prompts(40)
    for row in rows:
        row["prompt"] = f"<bos>{row['prompt']} <eos> Q"  # this tokenizer adds no BOS, so the text may
    study = load_study(write_own_study(tmp_path, rows))
    run = run_of(study, tmp_path / "store")
    first, *_ = (document for split in SPLITS for document in run.material.of_split(split))
    (line,) = [line for line in remarks([run]) if "control token" in line]
    assert all(part in line for part in ("4 documents", "4 control tokens", "(<eos>)", f"1 in '{first.doc}'"))


@pytest.mark.parametrize(("keys", "message"), [
    ("{ tools = true }", "model.chat_template_kwargs: kvdrift sets 'tools' itself"),
    ("{ enable_thinking = false }", "'enable_thinking'"),
])  # fmt: skip
def test_variables_of_chat_templates_are_checked(tmp_path: Path, keys: str, message: str) -> None:
    study = write_own_study(tmp_path, prompts(40), ('id = "model"', f'id = "model"\nchat_template_kwargs = {keys}'))
    assert message in refused(said, study)


def test_rows_are_only_left_out_of_their_own_file(tmp_path: Path) -> None:
    other = '\n[[documents]]\nsource = "jsonl"\npath = "{}"\nlength = 80\nstratum = "names"\ndevelopment = 2\nevaluation = 2\n\n[[act'
    both = write_own_study(tmp_path, of_strata(80), ("\n[[act", other.format("prompts.jsonl")))
    (line,) = left_out(load_study(both).documents)
    assert ": 10 of 80 rows " in line
    assert line.endswith(": 'dates' (10)")
    elsewhere = write_own_study(tmp_path, of_strata(80), ("\n[[act", other.format("more.jsonl")))
    (tmp_path / "more.jsonl").write_text(json.dumps(prompts(1)[0] | {"stratum": "x"}))
    first, second = left_out(load_study(elsewhere).documents)
    assert first.endswith("'names' (20), 'dates' (10)")
    assert second.startswith(f"{tmp_path / 'more.jsonl'}: 1 of 1 rows ")
    assert second.endswith(": 'x' (1)")
    rows = [row | {"stratum": f"s{number % 7}"} for number, row in enumerate(prompts(70))]
    (line,) = left_out(load_study(write_own_study(tmp_path, rows)).documents)
    assert line.endswith("'s0' (10), 's1' (10), 's2' (10), 's3' (10), 's4' (10) and 2 more")


def test_rows_without_a_stratum_fit_sections_that_share_a_file_by_parts(tmp_path: Path) -> None:
    """Each such row is a document, and a document is in one stratum."""
    other = '\n[[documents]]\nsource = "jsonl"\npath = "prompts.jsonl"\nlength = 80\nstratum = "names"\ndevelopment = 2\nevaluation = 2\n{}\n[[act'
    line = refused(said, write_own_study(tmp_path, prompts(80), ("\n[[act", other.format(""))))
    assert all(part in line for part in ("document 'p0'", "'words'", "'names'", 'part = "1/2"', 'part = "2/2"'))
    parts = ('stratum = "words"', 'stratum = "words"\npart = "1/2"'), ("\n[[act", other.format('part = "2/2"\n'))
    assert said(write_own_study(tmp_path, prompts(80), *parts)) == []


def test_tasks_whose_benchmark_scores_by_a_rule_that_is_not_here_are_said(tmp_path: Path) -> None:
    words = prompts(12)
    docs = [{"title": "k01", "text": row["prompt"]} for row in words[:2]]
    rows = [{"question": row["prompt"], "answers": ["v01"], "docs": docs} for row in words]
    (tmp_path / "qampari_eval_gtr_top2000.json").write_text(json.dumps(rows))
    forms = {"instruction": "k02", "demo_prompt": "{question}", "doc_prompt": "{text}", "demos": []}
    (tmp_path / "qampari_revised.json").write_text(json.dumps(forms))
    keys = 'source = "helmet"\ntasks = ["qampari"]\nshots = 0\nchat_template = false\nlength = 4096'
    study = write_own_study(
        tmp_path, [], ('source = "jsonl"\npath = "prompts.jsonl"\nlength = 80', f'{keys}\npath = "{tmp_path}"')
    )
    (line,) = said(study)
    assert line.startswith("documents 'words': answers of qampari ")
    assert [one.scoring for one in run_of(load_study(study), tmp_path / "store").material.of_split("evaluation")] == [
        ""
    ] * 2


def test_equal_prompts_of_several_clusters_are_said(tmp_path: Path) -> None:
    """Intervals take their documents for independent."""
    rows = prompts(40)
    (line,) = said(write_own_study(tmp_path, [row | {"prompt": rows[0]["prompt"]} for row in rows]))
    assert line.startswith("4 documents share 1 prompt, such as 'p0' and 'p2', ")


@pytest.mark.parametrize(
    ("eos", "says"),
    [
        (2, None),
        ([2, 255], None),
        (300, "EOS token 300 "),
        ([300, 2, -1], "EOS tokens 300, -1 "),
    ],
)  # fmt: skip
def test_eos_tokens_that_never_come_are_said(tmp_path: Path, eos: int | list[int], says: str | None) -> None:
    study = write_own_study(tmp_path, prompts(40))
    for name in ("generation_config.json", "config.json"):
        file = tmp_path / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": eos}))
    lines = said(study)
    assert len(lines) == (says is not None)
    assert all(line.startswith(f"model.id = 'model': {says}") for line in lines)


def test_documents_of_one_cluster_are_refused_or_said(tmp_path: Path) -> None:
    """No plan can be made from one cluster, and no interval of one."""
    names = {split: [name for name in map(str, range(40)) if split_of(name) == split] for split in SPLITS}
    development, evaluation = names["development"], names["evaluation"]
    rows = prompts(10)
    one = [row | {"cluster": development[0] if at < 3 else evaluation[at]} for at, row in enumerate(rows)]
    line = refused(said, write_own_study(tmp_path, one))
    assert line.startswith("documents 'words': all 2 development documents ")
    assert f"'{development[0]}'" in line
    other = [row | {"cluster": development[at] if at < 3 else evaluation[0]} for at, row in enumerate(rows)]
    single = [*prompts(40)], ("documents = 2\n", "documents = 1\n")
    for study, taken in (([other], "2 evaluation documents"), (single, "one evaluation document")):
        (line,) = said(write_own_study(tmp_path, *study))
        assert line.startswith(f"stratum 'words': a plan takes {taken}")


def test_too_few_draws_for_an_interval_are_said(tmp_path: Path) -> None:
    few = ("draws = 200", "draws = 200\nalpha = 0.001")
    assert said(write_own_study(tmp_path, prompts(40), few))[0].startswith("plan.draws = 200: ")


@pytest.mark.parametrize(
    ("primary", "line"),
    [
        ('"mismatch", "mismatch"', "plan.primary: 'mismatch' is given 2 times"),
        ('"lost"', "plan.primary: 'lost' "),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused_at_once(tmp_path: Path, primary: str, line: str) -> None:
    assert refused(said, write_own_study(tmp_path, prompts(40), ('"mismatch"', primary))).startswith(line)


def test_a_prompt_of_no_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"prompt": "\u2028"} for row in prompts(40)]
    line = mistake(capsys, "run", write_own_study(tmp_path, rows), "--dry-run")
    assert "tokenizer makes no token" in line


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = write_own_study(tmp_path, prompts(40))
    path = tmp_path / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {word: token + 150 for word, token in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))
    line = mistake(capsys, "run", study, "--dry-run")
    assert "256 tokens (vocab_size)" in line


def test_a_number_of_entries_that_is_the_whole_cache_is_said(tmp_path: Path) -> None:
    """Each such action has a line with its strata; actions that keep everything on purpose, or are coded, have none."""
    one = 'name = "snapkv-half"\nselector = "snapkv"\nkeep = "1/2"'
    longer = ('length = 384\nstratum = "tracking"', 'length = 768\nstratum = "tracking"')

    def said_of(new: str) -> list[str]:
        return said(write_study(tmp_path, (one, new), longer))

    (line,) = said_of('name = "snapkv-half"\nselector = "snapkv"\nkeep = 500')
    assert line.startswith("action 'snapkv-half': keep = 500 ")
    assert "5 of 10 documents (needle)" in line
    (line,) = said_of('name = "snapkv-half"\npolicy = "sliding"\nkeep = 5000')
    assert "10 of 10 documents (needle, tracking)" in line
    for kept in ('selector = "snapkv"\nkeep = "1/1"', 'selector = "snapkv"\nkeep = 5000\ncodec = "int8"'):
        assert said_of(f'name = "snapkv-half"\n{kept}') == []


def test_one_position_is_refused_where_nothing_can_differ_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = mistake(capsys, "run", write_study(tmp_path, ("horizon = 12", "horizon = 1")), "--dry-run")
    assert "study.horizon = 1: " in line


@pytest.mark.slow
def test_systems_of_one_position_have_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems draw their first token by laws that differ."""
    study = load_study(write_finite_study(tmp_path, ("horizon = 4", "horizon = 1")))
    run = run_of(study, tmp_path / "store")
    finish(run)
    monkeypatch.setattr("kvdrift.report.page.save", save)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_page(stages.report(run).read_text(encoding="utf-8"))


@pytest.mark.parametrize("temperature", ["1.0", "0"])
def test_weights_that_are_no_numbers_are_a_failure(tmp_path: Path, temperature: str) -> None:
    """Greedy decoding is included, since any logits have a most probable token."""
    study = load_study(write_own_study(tmp_path, prompts(40), ("seed = 3", f"seed = 3\ntemperature = {temperature}")))
    weights = tmp_path / "model" / "model.safetensors"
    content = {name: values.copy() for name, values in load_file(weights).items()}
    content["model.norm.weight"][5] = np.nan
    weights.unlink()
    save_file(content, weights, metadata={"format": "pt"})
    run = run_of(study, tmp_path / "store")
    stages.prepare(run)
    line = refused(stages.develop, run, error=OperationError)
    assert line.startswith("document 'p0', action 'recent-half': delta ")
    assert "at position 1" in line
    assert run.store.row_count("events") == 0
