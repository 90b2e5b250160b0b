"""A model's folder and a file of prompts of one's own: what is refused, and what a run says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import call, mistake
from fixtures.heard import Heard
from fixtures.own_files import prompts, write_own_study

from flows.study_file import run as study_files
from flows.study_file.remarks import remarks
from schema.study import load_studies

OTHERS = ("no stratum", "words", "names", "words", "dates", "names", "no stratum", "words")


def of_strata(count: int) -> list[dict[str, Any]]:
    """Rows that name strata in turn, or none."""
    rows = prompts(count)
    for number, row in enumerate(rows):
        if (named := OTHERS[number % len(OTHERS)]) != "no stratum":
            row["stratum"] = named
    return rows


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
    study_files.run_file(load_studies(study), tmp_path / "store", (), heard)
    assert heard.lines == [line, "runs"]


def test_rows_are_only_left_out_of_their_own_file(tmp_path: Path) -> None:
    other = '\n[[documents]]\nsource = "jsonl"\npath = "{}"\nlength = 80\nstratum = "names"\ndevelopment = 2\nevaluation = 2\n\n[[act'
    both = write_own_study(tmp_path, of_strata(80), ("\n[[act", other.format("prompts.jsonl")))
    (line,) = remarks(load_studies(both))
    assert line.endswith(
        "10 of 80 rows are left out, of strata that no [[documents]] section of the file has: 'dates' (10)"
    )
    elsewhere = write_own_study(tmp_path, of_strata(80), ("\n[[act", other.format("more.jsonl")))
    (tmp_path / "more.jsonl").write_text(json.dumps(prompts(1)[0] | {"stratum": "x"}))
    first, second = remarks(load_studies(elsewhere))
    assert first.endswith("'names' (20), 'dates' (10)")
    assert second == (
        f"{tmp_path / 'more.jsonl'}: 1 of 1 rows is left out, of strata that no [[documents]] section of the file has: "
        "'x' (1)"
    )
    rows = [row | {"stratum": f"s{number % 7}"} for number, row in enumerate(prompts(70))]
    (line,) = remarks(load_studies(write_own_study(tmp_path, rows)))
    assert line.endswith("'s0' (10), 's1' (10), 's2' (10), 's3' (10), 's4' (10) and 2 more")


def test_rows_without_a_stratum_of_their_own_need_no_line(tmp_path: Path) -> None:
    assert remarks(load_studies(write_own_study(tmp_path, prompts(40)))) == []


def test_a_prompt_of_no_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"prompt": "\u2028"} for row in prompts(40)]
    line = mistake(capsys, "run", write_own_study(tmp_path, rows), "--dry-run")
    assert line.endswith(": the tokenizer makes no token of its prompt\n")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = write_own_study(tmp_path, prompts(40))
    path = tmp_path / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {word: token + 150 for word, token in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))
    line = mistake(capsys, "run", study, "--dry-run")
    assert "the tokenizer makes token " in line
    assert line.endswith("beyond the model's 256 tokens (vocab_size); the folder's tokenizer is another model's\n")
