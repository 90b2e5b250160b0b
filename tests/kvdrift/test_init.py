"""``kvdrift init`` and the reference of study files agree with the schema."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.house import ROOT
from fixtures.study_files import load_study

from flows.plan.size import EvaluatedSize, size_bounds
from generator.documents.registry import choose_candidates
from kvdrift.examples import EXAMPLES
from kvdrift.study_files.keys import headings
from kvdrift.study_files.reference import study_reference
from schema.document import split_of
from schema.study import PlanSection


def init(capsys: pytest.CaptureFixture[str], path: Path, *options: str | Path) -> str:
    """The text of the file that the command writes."""
    code, out, err = call(capsys, "init", path, *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"wrote {path}"
    return path.read_text(encoding="utf-8")


def test_a_sweep_is_a_list_of_retentions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first member is the baseline."""
    options = ("--sweep", "snapkv:1/2,1/4,64", "--sweep", "recent:1/2,1/4", "--action", "few=recent:128")
    text = init(capsys, tmp_path / "study.toml", *options)
    assert 'keep = ["1/2", "1/4", 64]' in text
    study = load_study(tmp_path / "study.toml")
    members = ["snapkv@1/2", "snapkv@1/4", "snapkv@64", "recent@1/2", "recent@1/4"]
    assert [action.name for action in study.actions] == ["few", *members]
    assert study.plan.baseline == "few"
    assert 'baseline = "snapkv@1/2"' in init(capsys, tmp_path / "swept.toml", *options[:4])


@pytest.mark.parametrize("written", ["snapkv", "snapkv:1/2", "snapkv:1/2,", ":1/2,1/4"])
def test_a_sweep_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str) -> None:
    line = f"--sweep {written}: write SELECTOR:KEEP,KEEP, as in snapkv:3/4,1/2,1/4"
    assert line in mistake(capsys, "init", tmp_path / "study.toml", "--sweep", written)


def test_the_page_is_that_of_the_schema() -> None:
    """``make docs`` writes it."""
    assert (ROOT / "docs" / "study-file.md").read_text(encoding="utf-8") == study_reference()


def test_every_key_has_a_meaning_and_numbers_have_units() -> None:
    pure = ("seed", "temperature")  # numbers without a unit
    for heading in headings().values():
        assert heading.meaning.endswith("."), heading.name
        for key in heading.keys.values():
            assert key.meaning.endswith("."), key.name
            assert key.unit or not key.kind.startswith(("integer", "number")) or key.name in pure, key.name


def test_kinds_and_bounds_are_those_of_the_schema() -> None:
    plan = headings()["plan"].keys
    assert plan.keys() == PlanSection.model_fields.keys()
    assert (plan["alpha"].kind, plan["alpha"].default) == ("number between 0 and 1", "0.05")
    assert plan["replicates"].kind == '"auto" or integer, 1 to 16,777,216'
    assert plan["replicates_between"].default == "[16, 64]"
    assert plan["draws"].kind == "integer, 100 to 1,000,000"
    assert plan["baseline"].required
    assert headings()["model"].keys["alphabet"].kind == "integer, 2 to 64"
    assert headings()["documents"].keys["length"].required


def test_each_key_of_a_new_file_is_explained_where_it_stands_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = init(capsys, tmp_path / "my study.toml")
    lines, explained = text.splitlines(), set[str]()
    section = ""
    for before, line in zip(["", *lines], lines, strict=False):
        section = line.strip("[]") if line.startswith("[") else section
        name = line.partition(" = ")[0]
        if " = " in line and not line.startswith("#") and (section, name) not in explained:
            assert before.startswith("# "), line
            explained.add((section, name))
    content = tomllib.loads(text)
    assert content["study"]["name"] == "my-study"
    study = load_study(tmp_path / "my study.toml")
    assert [action.name for action in study.actions] == ["snapkv-half", "recent-half"]
    line = mistake(capsys, "init", tmp_path / "my study.toml")
    assert line.endswith("my study.toml: is there already; remove it, or give another name\n")
    assert (tmp_path / "my study.toml").read_text() == text


def test_a_dry_run_accepts_what_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvdrift.dry_run.needs._time_lines", lambda *_, **__: iter(()))
    init(capsys, Path("mine.toml"), "--horizon", "16", "--action", "half=snapkv:1/2", "--action", "few=recent:100",
         "--task", "needle", "--length", "384")  # fmt: skip
    code, out, err = call(capsys, "run", "mine.toml", "--dry-run")
    assert (code, err) == (0, "")
    assert "study 'mine' on kvdrift/tiny, H = 16" in out
    assert "development: 3 documents, 9 units" in out
    assert "action few: recent, 100 entries: 100 prompt entries" in out


def test_a_dry_run_accepts_the_example_of_a_sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its least retention fits the embedded model's shortest prompts, which is more than a selector's window."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvdrift.dry_run.needs._time_lines", lambda *_, **__: iter(()))
    (example,) = [line for line in EXAMPLES["init"] if "--sweep" in line]
    init(capsys, Path("mine.toml"), *example.split()[3:])
    code, out, err = call(capsys, "run", "mine.toml", "--dry-run")
    assert (code, err) == (0, "")
    assert "action snapkv@1/4: snapkv, a quarter of the entries" in out


def test_prompts_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Strata, counts and the bound of lengths follow from the file; paths are relative to the study file's folder."""
    rows = [{"id": f"r{n}", "prompt": "word " * (20 + n), "stratum": "ab"[n % 2]} for n in range(80)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "studies").mkdir()
    path = tmp_path / "studies" / "mine.toml"
    options = ("--documents", tmp_path / "data" / "mine.jsonl", "--model", "org/model")
    init(capsys, path, *options)
    study = load_study(path)
    assert [part.stratum_name for part in study.documents] == ["a", "b"]
    assert {part.path for part in study.documents} == {str(tmp_path / "data" / "mine.jsonl")}
    assert study.documents[0].length == 576  # 99 words of 5 bytes, and room for special tokens
    assert sum(part.development + part.evaluation for part in study.documents) <= 80
    assert min(part.development for part in study.documents) >= 2
    (tmp_path / "data" / "mine.jsonl").write_text(json.dumps(rows[0]))
    line = mistake(capsys, "init", tmp_path / "few.toml", *options)
    assert "1 row(s) of 'a' are too few" in line


def test_few_prompts_are_all_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Seven: two for development, and N is five, however few the half-width would ask for; of 200 N is 12 or more."""
    for count, expected in ((7, (5, 5)), (200, (12, 48))):
        rows = "".join(json.dumps({"id": f"p{n}", "prompt": "word " * 9}) + "\n" for n in range(count))
        (tmp_path / f"{count}.jsonl").write_text(rows)
        path = tmp_path / f"{count}.toml"
        init(capsys, path, "--documents", tmp_path / f"{count}.jsonl", "--model", "org/model")
        _, documents = size_bounds(load_study(path), EvaluatedSize(0, 0))
        assert documents == expected


@pytest.mark.parametrize("rows", [4, 5, 12])
def test_a_few_rows_are_split_so_that_a_run_takes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: int
) -> None:
    """By hash all of them are for evaluation; the counts are those that a run finds."""
    ids = [name for name in map(str, range(40)) if split_of(name) == "evaluation"][:rows]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"id": name, "prompt": "word"}) + "\n" for name in ids))
    init(capsys, tmp_path / "p.toml", "--documents", file, "--model", "org/model")
    (part,) = load_study(tmp_path / "p.toml").documents
    assert (part.development, part.evaluation) == (2, rows - 2)
    (chosen,) = choose_candidates([part], 0)
    assert {split: len(items) for split, items in chosen.items()} == {"development": 2, "evaluation": rows - 2}
    file.write_text(file.read_text().replace('"word"', '"word", "split": "evaluation"'))
    assert "0 on the development side" in mistake(
        capsys, "init", tmp_path / "q.toml", "--documents", file, "--model", "org/model"
    )


def test_a_model_that_no_folder_and_no_hub_has_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``init`` refuses it, and so does a run; if a folder with a model was probably meant, the line names it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("llama-tiny", "models/sub/small", "llama-tonic"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mine" / "other").mkdir(parents=True)
    for folder in ("llama-tiny", "models/sub/small"):
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"id": f"p{n}", "prompt": "w"}) + "\n" for n in range(9)))
    known = {"llama-tony": "; did you mean './llama-tiny'?", "models/sub/smal": "; did you mean 'models/sub/small'?",
             "unlike": "", "models/x": "", "mine/x": ""}  # fmt: skip
    for name, hint in known.items():
        line = mistake(capsys, "init", "mine.toml", "--model", name, "--documents", "mine.jsonl")
        said = f"'{name}': no such folder in {tmp_path}, and no Hugging Face id, OWNER/NAME{hint}\n"
        assert line == f"kvdrift: --model {said}"
        assert not (tmp_path / "mine.toml").exists()
        init(capsys, tmp_path / "hub.toml", "--model", "org/model", "--documents", "mine.jsonl")
        text = (tmp_path / "hub.toml").read_text()
        (tmp_path / "hub.toml").unlink()
        (tmp_path / "study.toml").write_text(text.replace('"org/model"', f'"{name}"'))
        for options in ((), ("--dry-run",)):
            assert mistake(capsys, "run", "study.toml", *options) == f"kvdrift: model.id = {said}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "needles"), "--task needles: no task that is made here for this model; did you mean 'needle'?"),
        (("--action", "snapkv:1/2"), "--action snapkv:1/2: write NAME=SELECTOR:KEEP, as in snapkv-half=snapkv:1/2"),
        (("--action", "a=snapvk:1/2"), "unknown selector 'snapvk'; did you mean 'snapkv'?"),
        (("--action", "a=snapkv:0.5"), "keep = '0.5': write an integer, an exact fraction"),
        (("--length", "100"), "length 100: the embedded source has the lengths 384, 768, 1536"),
        (("--model", "./nowhere"), "--model ./nowhere: no such folder"),
        (("--documents", "x.jsonl"), "--documents x.jsonl: kvdrift/tiny reads no text; give --model too"),
        (("--documents", "x.jsonl", "--model", "org/m"), "--documents x.jsonl: no such file, expected JSON Lines"),
        (("--documents", "x.jsonl", "--task", "needle"), "--task: names prompts that kvdrift makes"),
    ],
)
def test_mistakes_write_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in mistake(capsys, "init", tmp_path / "mine.toml", *options)
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.slow
def test_what_is_written_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init(capsys, Path("mine.toml"), "--horizon", "8", "--task", "needle", "--length", "384")
    code, _, _ = call(capsys, "run", "mine.toml")
    assert code == 0
    assert (tmp_path / "stores" / "mine" / "report" / "mine" / "index.html").is_file()
