"""``kvdrift init --engine``: the studies that it writes, and its refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fixtures.byte_level import byte_level_tokenizer
from fixtures.command import call
from fixtures.gguf_models import write_random_llama
from fixtures.house import ROOT
from fixtures.study_files import load_study

from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_GGUF
from kvdrift.schema.study import Study, load_studies

ENGINE = ("--engine", "llama.cpp")


def written(capsys: pytest.CaptureFixture[str], path: Path, *options: str | Path) -> Study:
    assert call(capsys, "init", path, *ENGINE, *options)[::2] == (0, "")
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
@pytest.mark.parametrize("option", [("--model",), ("--gguf",), (*ENGINE, "--model"), (*ENGINE, "--gguf")])
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
def test_what_is_written_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
