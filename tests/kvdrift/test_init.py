"""``kvdrift init`` and the reference of study files agree with the schema."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from fixtures.byte_level import byte_level_tokenizer
from fixtures.command import call, mistake
from fixtures.gguf_models import write_random_llama
from fixtures.house import ROOT
from fixtures.study_files import load_study

from kvdrift.commands.init import init as init_command
from kvdrift.flows.material import gather_material
from kvdrift.flows.plan.making import EvaluatedSize, size_bounds
from kvdrift.generator.documents.registry import choose_candidates
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_GGUF
from kvdrift.schema.document import split_of
from kvdrift.schema.study import Study, load_studies
from kvdrift.study_files.commented import headings, kind
from kvdrift.study_files.reference import study_reference

LLAMA_CPP = ("--engine", "llama.cpp")


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


def test_an_example_is_a_shipped_study_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None replaces a file, and none is written with a change."""
    monkeypatch.chdir(tmp_path)
    names = [path.stem for path in sorted((ROOT / "studies").glob("*.toml"))]
    assert [line.split()[0] for line in call(capsys, "list", "examples")[1].splitlines()] == names
    for name in names:
        code, out, err = call(capsys, "init", "--example", name)
        assert (code, err, out.splitlines()[0]) == (0, "", f"wrote {name}.toml")
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in (ROOT / "studies").iterdir()}
    assert load_study(tmp_path / "sharp_interval.toml").model.tables == "sharp_interval.json"
    assert "weights.toml: is there already" in mistake(capsys, "init", "--example", "weights")
    assert "'quickstart'" in mistake(capsys, "init", "--example", "quikstart")
    assert "--example" in mistake(capsys, "init", "mine.toml", "--example", "weights", "--task", "needle")
    (tmp_path / "smollm2.toml").unlink()
    (tmp_path / "smollm2.jsonl").write_text("changed", encoding="utf-8")
    assert "smollm2.jsonl: is there already" in mistake(capsys, "init", "--example", "smollm2")


def test_the_page_is_that_of_the_schema() -> None:
    """``make docs`` writes it."""
    assert (ROOT / "docs" / "study-file.md").read_text(encoding="utf-8") == study_reference()


def test_every_key_has_a_meaning_and_numbers_have_units() -> None:
    pure = ("seed", "temperature")  # numbers without a unit
    for heading in headings().values():
        assert heading.meaning.endswith("."), heading.title
        for name, key in heading.keys.items():
            assert key["description"].endswith("."), name
            assert key.get("unit") or not kind(key).startswith(("integer", "number")) or name in pure, name


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
    assert "my study.toml: is there already" in line
    assert (tmp_path / "my study.toml").read_text() == text


def test_a_dry_run_accepts_the_example_of_a_sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its least retention fits the embedded model's shortest prompts, which is more than a selector's window."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvdrift.dry_run.description.time_lines", lambda *_, **__: iter(()))
    (example,) = [line for line in str(init_command.__doc__).splitlines() if "--sweep" in line]
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
    assert study.documents[0].length == 640  # a row of 99 words of 5 bytes, and room for special tokens
    assert sum(part.development + part.evaluation for part in study.documents) <= 80
    assert min(part.development for part in study.documents) >= 2
    (tmp_path / "data" / "mine.jsonl").write_text(json.dumps(rows[0]))
    line = mistake(capsys, "init", tmp_path / "few.toml", *options)
    assert "1 row(s) of 'a'" in line


def model_folder(folder: Path, *, positions: int = 512, chat: bool = True) -> Path:
    """The configuration and the tokenizer of a model, whose weights are elsewhere."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if chat else None
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(tokenizer),
              "max_position_embeddings": positions}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_prompts(file: Path, texts: list[str]) -> Path:
    rows = [{"id": f"d{number:02}", "prompt": text} for number, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_are_counted_as_a_run_counts_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *, chat: bool
) -> None:
    """By the model's tokenizer, with its chat template if it has one; a run's documents fit the length."""
    model = model_folder(tmp_path / "model", chat=chat)
    texts = ["The grass is green. " * (30 + number) for number in range(16)]
    documents = write_prompts(tmp_path / "mine.jsonl", texts)
    text = init(capsys, tmp_path / "mine.toml", "--model", model, "--documents", documents)
    assert ("chat_template = true" in text) is chat
    study = load_study(tmp_path / "mine.toml")
    material = gather_material(study, offline=True)
    counted = [one.prompt_tokens for split in ("development", "evaluation") for one in material.of_split(split)]
    assert len(counted) == 16
    assert max(counted) <= study.documents[0].length < max(counted) + 64 < len(texts[-1])


def test_documents_that_leave_no_room_for_the_horizon_are_named_and_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What fits is a study that a run accepts; a bound of the user's own leaves out what is longer, too."""
    model = model_folder(tmp_path / "model")
    texts = ["The grass is green. " * (30 + number + 200 * (number in (3, 12))) for number in range(16)]
    documents = write_prompts(tmp_path / "mine.jsonl", texts)
    options = ("--model", model, "--documents", documents, "--horizon", "100")
    code, out, _ = call(capsys, "init", tmp_path / "mine.toml", *options)
    (line,) = [line for line in out.splitlines() if "longer than" in line]
    assert code == 0
    assert re.search(
        r"2 of 16 documents .* 412 tokens .* 100 .* 512 positions.* d03 \(\d,?\d+\), d12 \(\d,?\d+\)$", line
    )
    study = load_study(tmp_path / "mine.toml")
    section = study.documents[0]
    assert (section.development + section.evaluation, section.exclude) == (14, str(tmp_path / "mine-exclude.json"))
    material = gather_material(study, offline=True)
    names = {one.doc for split in ("development", "evaluation") for one in material.of_split(split)}
    assert names == {f"d{number:02}" for number in range(16)} - {"d03", "d12"}
    line = mistake(capsys, "init", tmp_path / "more.toml", *options, "--length", "413")
    assert re.search(r"--length 413: .* 512 .* 100 .* 412 ", line)
    most = max(one.prompt_tokens for one in material.of_split("evaluation")) - 1
    code, out, _ = call(capsys, "init", tmp_path / "less.toml", *options, "--length", str(most))
    assert (code, f"longer than {most} tokens" in out) == (0, True)
    assert load_study(tmp_path / "less.toml").documents[0].length == most


@pytest.mark.parametrize(
    ("positions", "tokens", "horizon", "fits"),
    [
        (2049, 2049, 5, False),  # stanford-crfm/helm issue 94: 2,049 in the prompt and 5 to complete
        (4097, 1090, 3072, False),  # tatsu-lab/stanford_alpaca issue 47
        (4097, 1090, 3007, True),
    ],
)
def test_a_prompt_and_its_continuation_fit_the_positions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *, positions: int, tokens: int, horizon: int, fits: bool
) -> None:
    model = model_folder(tmp_path / "model", positions=positions, chat=False)
    documents = write_prompts(tmp_path / "mine.jsonl", ["~" * 150] * 15 + ["~" * tokens])
    options = ("--model", model, "--documents", documents, "--horizon", str(horizon))
    code, out, _ = call(capsys, "init", tmp_path / "mine.toml", *options)
    assert (code, f"d15 ({tokens:,})" in out) == (0, not fits)
    assert load_study(tmp_path / "mine.toml").documents[0].length <= positions - horizon


def test_what_a_run_would_refuse_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A horizon without room for any prompt (EleutherAI/lm-evaluation-harness issue 4001), and too short prompts."""
    model = model_folder(tmp_path / "model", positions=2048)
    documents = write_prompts(tmp_path / "mine.jsonl", ["The grass is green. "] * 16)
    options = ("--model", model, "--documents", documents)
    line = mistake(capsys, "init", tmp_path / "mine.toml", *options, "--horizon", "32768")
    assert re.search(r"--horizon 32768: .* 2,048 positions", line)
    line = mistake(capsys, "init", tmp_path / "mine.toml", *options)
    assert "action 'snapkv-half', document 'd00': keep = 1/2 retains" in line
    assert list(tmp_path.glob("*.toml")) == []


def test_prompts_that_are_made_fit_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """RULER's prompts have 4,096 tokens, or as many as a horizon leaves."""
    for positions, length in ((2048, 1984), (8192, 4096)):
        model = model_folder(tmp_path / f"model-{positions}", positions=positions)
        text = init(capsys, tmp_path / f"{positions}.toml", "--model", model, "--task", "vt")
        assert f"length = {length}\n" in text
        assert "chat_template = true\n" in text


def test_without_a_tokenizer_a_line_says_that_the_length_is_an_estimate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    documents = write_prompts(tmp_path / "mine.jsonl", ["The grass is green. " * 20] * 16)
    options = ("--model", "org/model", "--documents", documents)
    for name, more, what in (
        ("a", (), "length is an estimate of a token for each byte"),
        ("b", ("--length", "99"), "not counted"),
    ):
        code, out, err = call(capsys, "init", tmp_path / f"{name}.toml", *options, *more)
        assert (code, err, "chat_template" in (tmp_path / f"{name}.toml").read_text()) == (0, "", False)
        (line,) = [line for line in out.splitlines() if "org/model" in line]
        assert what in line
        assert "chat_template is not set" in line


def test_a_model_that_the_hub_lacks_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.study_files.own_prompts.is_on_hub", lambda *_: False)
    documents = write_prompts(tmp_path / "mine.jsonl", ["The grass is green."] * 16)
    line = mistake(capsys, "init", tmp_path / "mine.toml", "--model", "org/none", "--documents", documents)
    assert "--model org/none: " in line
    assert list(tmp_path.glob("*.toml")) == []


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
        (("--sweep", "snapkv"), "--sweep snapkv: write SELECTOR:KEEP,KEEP, as in "),
        (("--sweep", "snapkv:1/2"), "--sweep snapkv:1/2: write SELECTOR:KEEP,KEEP, as in "),
        (("--sweep", "snapkv:1/2,"), "--sweep snapkv:1/2,: write SELECTOR:KEEP,KEEP, as in "),
        (("--sweep", ":1/2,1/4"), "--sweep :1/2,1/4: write SELECTOR:KEEP,KEEP, as in "),
        (("--engine", "llamacpp"), "--engine llamacpp: did you mean 'llama.cpp'?"),
        (("--engine", "http"), "--engine http: "),
        ((*LLAMA_CPP, "--cache-types", "q8_0,q9_0"), "--cache-types q9_0: type_k = 'q9_0': "),
        # Anbeeld/beellama.cpp issue 120
        ((*LLAMA_CPP, "--cache-types", "q8_0/kvarn6"), "--cache-types q8_0/kvarn6: type_v = 'kvarn6': "),
        ((*LLAMA_CPP, "--gguf", "none.gguf"), "--gguf none.gguf: "),
        ((*LLAMA_CPP, "--weights", "none.gguf"), "--weights none.gguf: "),
        (("--model", "none.gguf"), "--model none.gguf: "),
        ((*LLAMA_CPP, "--model", "org/model"), "--model org/model: "),
        (("--model", "a.gguf", "--gguf", "b.gguf"), "--model a.gguf: --gguf"),
        ((*LLAMA_CPP, "--action", "half=snapkv:1/2"), "--action: "),
        (("--cache-types", "q8_0"), "--cache-types: "),
        (("--model", Path(__file__)), "test_init.py: "),
        (("--gguf", Path(__file__)), "--gguf "),
        (("--vllm", "http://here:1"), "--vllm http://here:1: "),
        (("--vllm", "a=http://here:1", "--vllm", "b=http://here:2"), "--vllm a=http://here:1 "),
        (("--vllm", "http://here:1", "--vllm", "a=http://here:2", "--cache-types", "q8_0"), "--vllm: "),
        (("--task", "needles"), "--task needles: "),
        (("--action", "snapkv:1/2"), "--action snapkv:1/2: "),
        (("--action", "a=snapvk:1/2"), "'snapkv'"),
        (("--model", "./nowhere"), "--model ./nowhere: "),
        (("--documents", "x.jsonl"), "--documents x.jsonl: "),
        (("--documents", "x.jsonl", "--model", "org/m"), "--documents x.jsonl: no such file"),
        (("--documents", "x.jsonl", "--task", "needle"), "--task: "),
    ],
)
def test_mistakes_write_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str | Path, ...], message: str
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


# Engines


def written(capsys: pytest.CaptureFixture[str], path: Path, *options: str | Path) -> Study:
    assert call(capsys, "init", path, *LLAMA_CPP, *options)[::2] == (0, "")
    return load_study(path)


def sides(study: Study) -> dict[str, tuple[dict[str, object] | None, str | None]]:
    made = {action.name: (action.settings, action.weights) for action in study.actions if action.name != "floor"}
    assert made.pop("kernel-floor") == ({"flash_attention": False}, None)
    return made


def test_without_more_it_compares_two_cache_types_of_the_embedded_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = written(capsys, tmp_path / "study.toml")
    assert (study.model.engine, study.model.id) == ("llama.cpp", "kvdrift/tiny-F32.gguf")
    assert sides(study) == {
        f"cache-{kind}": ({"type_k": kind, "type_v": kind}, None) for kind in ("q8_0", "q4_0")
    }  # fmt: skip
    assert study.plan.baseline == "cache-q8_0"


def test_one_cache_type_has_no_contrast_with_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(capsys, tmp_path / "study.toml", "--cache-types", "q8_0").plan.primary == ["mismatch"]


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without llama.cpp, where a GGUF file is known by its first bytes only."""
    monkeypatch.setattr("kvdrift.study_files.own_prompts.find_spec", lambda _: None)


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("option", [("--model",), ("--gguf",), (*LLAMA_CPP, "--model"), (*LLAMA_CPP, "--gguf")])
def test_a_gguf_file_is_for_llama_cpp_however_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    code, out, err = call(capsys, "init", tmp_path / "study.toml", *option, tmp_path / "model.gguf")
    assert (code, err) == (0, "")
    assert "model.gguf' cannot be loaded (it needs the package xllamacpp" in out
    study = load_study(tmp_path / "study.toml")
    assert (study.model.engine, study.model.id) == ("llama.cpp", "model.gguf")
    assert sides(study).keys() == {"cache-q8_0", "cache-q4_0"}


@pytest.mark.usefixtures("no_package")
def test_cache_types_and_weights_are_an_action_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "model-Q4_K_M.gguf").touch()
    (tmp_path / "studies").mkdir()
    study = written(
        capsys, tmp_path / "studies" / "study.toml", "--gguf", tmp_path / "model.gguf", "--cache-types",
        "q5_1, q8_0/q4_0", "--weights", tmp_path / "model-Q4_K_M.gguf",
    )  # fmt: skip
    assert study.model.id == "../model.gguf"
    assert sides(study) == {
        "cache-q5_1": ({"type_k": "q5_1", "type_v": "q5_1"}, None),
        "cache-q8_0-q4_0": ({"type_k": "q8_0", "type_v": "q4_0"}, None),
        "model-Q4_K_M": (None, "../model-Q4_K_M.gguf"),
    }


def test_servers_are_the_reference_and_an_action_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--vllm", "http://here:1", "--vllm", "fp8=http://here:2", "--vllm", "kernel-floor=http://here:3")
    assert call(capsys, "init", tmp_path / "study.toml", *options)[::2] == (0, "")
    study = load_study(tmp_path / "study.toml")
    assert (study.model.engine, study.model.url) == ("http", "http://here:1")
    assert study.model.settings == {"api": "vllm", "processor": True}
    urls = {action.name: action.url for action in study.actions if action.url}
    assert urls == {"fp8": "http://here:2", "kernel-floor": "http://here:3"}


@pytest.mark.llama_cpp
def test_prompts_are_counted_with_the_files_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has 2,048 positions and a chat template; its tokenizer is the one that it was written from."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    file = write_random_llama(tmp_path / "model.gguf", head_size=32, tokenizer=tokenizer)
    texts = [f"Read {number}. " + "The grass is green. " * (10 + number) for number in range(16)]
    rows = [json.dumps({"id": f"d{number:02}", "prompt": text}) + "\n" for number, text in enumerate(texts)]
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    code, out, _ = call(
        capsys, "init", tmp_path / "study.toml", "--model", file, "--documents", tmp_path / "mine.jsonl"
    )
    assert (code, "cannot be loaded" in out) == (0, False)
    (section,) = load_study(tmp_path / "study.toml").documents
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
             for text in texts]  # fmt: skip
    longest = max(map(len, chats))
    assert section.chat_template
    assert longest <= section.length < longest + 64
    assert section.development + section.evaluation == 16
    code, out, _ = call(
        capsys, "init", tmp_path / "long.toml", "--model", file, "--documents", tmp_path / "mine.jsonl", "--horizon",
        str(2048 - longest + 1),
    )  # fmt: skip
    assert code == 0
    assert re.search(rf"1 of 16 documents .* {longest - 1} tokens", out)
    assert f"d15 ({longest})" in out


@pytest.mark.llama_cpp
def test_what_is_written_for_llama_cpp_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--horizon", "4", "--task", "needle", "--length", "384", "--cache-types", "q8_0,q4_0")
    study = tmp_path / "mine.toml"
    written(capsys, study, *options, "--weights", "kvdrift/tiny-Q4_0.gguf")
    text = study.read_text()
    for name, value in (("evaluation", 6), ("documents_at_least", 6), ("replicates", 2)):
        assert f"{name} = " in text
        text = text.replace(f"{name} = ", f"{name} = {value} # ")
    study.write_text(text)
    assert call(capsys, "run", study, "--store", tmp_path / "store")[0] == 0
    page = (tmp_path / "store" / "report" / "mine" / "index.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("cache-q8_0", "cache-q4_0", "tiny-Q4_0", "floor"))


@pytest.mark.llama_cpp
def test_the_shipped_study_has_the_sides_that_its_file_names() -> None:
    (study,) = load_studies(ROOT / "studies" / "llama_cpp.toml")
    made = engine_model(study).sides
    weights = {name: side.file.relative_to(EMBEDDED_GGUF).name for name, side in made.items() if name != "floor"}
    assert {name: file for name, file in weights.items() if name.startswith("weights")} == {
        "weights-Q8_0": "tiny-Q8_0.gguf", "weights-Q4_0": "tiny-Q4_0.gguf",
    }  # fmt: skip
