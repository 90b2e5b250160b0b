"""``kvdrift init --engine``: the studies that it writes, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.house import ROOT
from fixtures.study_files import load_study

from generator.generation.engine_models import engine_model
from generator.transformer.files.local_folders import EMBEDDED_GGUF
from schema.study import Study, load_studies

ENGINE = ("--engine", "llama.cpp")


def written(capsys: pytest.CaptureFixture[str], path: Path, *options: str | Path) -> Study:
    assert call(capsys, "init", path, *ENGINE, *options)[::2] == (0, "")
    return load_study(path)


def sides(study: Study) -> dict[str, tuple[dict[str, object] | None, str | None]]:
    return {action.name: (action.settings, action.weights) for action in study.actions if action.name != "floor"}


def test_without_more_it_compares_two_cache_types_of_the_embedded_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = written(capsys, tmp_path / "study.toml")
    assert (study.model.engine, study.model.id) == ("llama.cpp", "kvdrift/tiny-F32.gguf")
    assert sides(study) == {
        f"cache-{kind}": ({"type_k": kind, "type_v": kind}, None) for kind in ("q8_0", "q4_0")
    }  # fmt: skip
    assert study.plan.baseline == "cache-q8_0"


def test_cache_types_and_weights_are_an_action_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").touch()
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "llamacpp"), "--engine llamacpp: did you mean 'llama.cpp'?"),
        (("--engine", "http"), "--engine http: a study of servers is written by hand"),
        ((*ENGINE, "--cache-types", "q8_0,q9_0"), "--cache-types q9_0: type_k = 'q9_0': did you mean"),
        ((*ENGINE, "--cache-types", "q8_0/q9_0"), "--cache-types q8_0/q9_0: type_v = 'q9_0': did you mean"),
        ((*ENGINE, "--gguf", "none.gguf"), "--gguf none.gguf: no such file"),
        ((*ENGINE, "--weights", "none.gguf"), "--weights none.gguf: no such file"),
        (
            (*ENGINE, "--model", "org/model"),
            "--model: not for engine llama.cpp; use --gguf, --cache-types and --weights",
        ),
        (
            (*ENGINE, "--action", "half=snapkv:1/2"),
            "--action: not for engine llama.cpp; use --gguf, --cache-types and --weights",
        ),
        (("--gguf", "model.gguf"), "--gguf: belongs to an engine; add --engine llama.cpp"),
        (("--cache-types", "q8_0"), "--cache-types: belongs to an engine; add --engine llama.cpp"),
        (("--weights", "model.gguf"), "--weights: belongs to an engine; add --engine llama.cpp"),
    ],
)
def test_mistakes_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert said in mistake(capsys, "init", tmp_path / "mine.toml", *options)
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.llama_cpp
def test_what_is_written_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--horizon", "4", "--task", "needle", "--length", "384", "--cache-types", "q8_0,q4_0")
    study = tmp_path / "mine.toml"
    written(capsys, study, *options, "--weights", "kvdrift/tiny-Q4_0.gguf")
    text = study.read_text()
    for old, new in (("evaluation = ", "evaluation = 6 # "), ("replicates = ", "replicates = 2 # ")):
        assert old in text
        text = text.replace(old, new)
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
