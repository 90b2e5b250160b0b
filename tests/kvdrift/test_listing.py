"""``kvdrift list``, and the models found on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import call
from huggingface_hub import constants

from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.transformer.files.local_folders import (
    EMBEDDED_ID,
    cached_models,
    has_local_weights,
    local_configuration,
)
from kvdrift.study_files.commented import headings

LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def listing(capsys: pytest.CaptureFixture[str], what: str) -> str:
    """Return the output of ``kvdrift list``."""
    code, out, _ = call(capsys, "list", what)
    assert code == 0
    return out


def test_every_key_of_a_study_file_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = {line.partition("  ")[0] for line in listing(capsys, "keys").splitlines()}
    assert found == {f"{heading.title} {key}" for heading in headings().values() for key in heading.keys}
    assert "[[documents]] length" in found


def put(cache: Path, model_id: str, files: dict[str, Any]) -> None:
    """A snapshot of a model with these files, as the hub's client lays it out."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        (snapshot / name).write_text(json.dumps(content))


def test_models_in_the_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(cache, "one/whole", {"config.json": LLAMA, "model.safetensors": ""})
    put(cache, "one/bare-config", {"config.json": {"architectures": ["Qwen3ForCausalLM"]}})
    put(cache, "two/other", {"config.json": {"architectures": ["MistralForCausalLM"]}, "model.safetensors": ""})
    put(cache, "two/broken", {"config.json": []})
    assert cached_models() == {
        "one/bare-config": "Qwen3ForCausalLM", "one/whole": "LlamaForCausalLM", "two/other": "MistralForCausalLM"
    }  # fmt: skip
    assert "in the Hugging Face cache: MistralForCausalLM, not proven yet" in listing(capsys, "models")
    lines = [line.split(None, 1) for line in listing(capsys, "models").splitlines()]
    assert ["one/whole", "in the Hugging Face cache: LlamaForCausalLM"] in lines
    assert ["one/bare-config", "in the Hugging Face cache: Qwen3ForCausalLM, without its weights"] in lines


def test_weights_are_here_only_as_a_whole(cache: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {"model.safetensors.index.json": index, "model-00001-of-00002.safetensors": ""}
    put(cache, "some/half", {"config.json": LLAMA, **shards})
    put(cache, "some/all", {"config.json": LLAMA, **shards, "model-00002-of-00002.safetensors": ""})
    assert not has_local_weights("some/half")
    assert has_local_weights("some/all")
    assert not has_local_weights("some/all", revision="other")
    assert local_configuration("some/half") == LLAMA
    for model_id in ("nobody/nothing", "a/b/c", "no such id", "./nowhere"):
        assert not has_local_weights(model_id)
        assert local_configuration(model_id) is None
    folder = tmp_path / "folder"
    folder.mkdir()
    assert not has_local_weights(str(folder))
    (folder / "model.safetensors").write_text("")
    assert has_local_weights(str(folder))
    assert has_local_weights(EMBEDDED_ID)


def test_selectors_have_their_parameters_and_papers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line.split()[0]: line for line in listing(capsys, "selectors").splitlines()}
    assert set(SELECTORS) < set(lines)
    assert lines["snapkv"].endswith("; window = 64; kernel = 5; budget = even; Li et al. 2024, arXiv:2404.14469")
    assert lines["recent"].endswith("; sinks = 4; Xiao et al. 2024, StreamingLLM, arXiv:2309.17453")
    assert {name for name in SELECTORS if "arXiv:" not in lines[name]} == {"full", "numerics", "random"}
    assert "decomposition" in listing(capsys, "views")
