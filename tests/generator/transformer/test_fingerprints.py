"""Fingerprints of a model's files: SHA-256 of every byte, kept only while it is certain to be right."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdrift.generator.transformer.files import fingerprints
from kvdrift.generator.transformer.files.digests import digests_path
from kvdrift.generator.transformer.files.fingerprints import model_identity

pytestmark = pytest.mark.usefixtures("own_cache")
LONG_AGO = time.time_ns() - 10**12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, as far as fingerprints are concerned; its files are old."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "README.md", "pytorch_model.bin"):
        put(folder, name, f"content of {name}")
    return folder


def put(folder: Path, name: str, content: str, modified: int = LONG_AGO) -> None:
    (folder / name).write_text(content)
    os.utime(folder / name, ns=(modified, modified))


def expected(folder: Path, *names: str) -> str:
    digests = [[name, hashlib.sha256((folder / name).read_bytes()).hexdigest()] for name in sorted(names)]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def test_they_are_hashes_of_what_loading_reads(folder: Path) -> None:
    found = model_identity(str(folder))
    assert found.weights_sha256 == expected(folder, "config.json", "model.safetensors")
    assert found.tokenizer_sha256 == expected(folder, "tokenizer.json", "vocab.txt")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (
            lambda folder: put(folder, "model.safetensors", "content of model.safetensorz", LONG_AGO + 1),
            {"weights_sha256"},
        ),
        (lambda folder: put(folder, "generation_config.json", "{}"), {"weights_sha256"}),
        (lambda folder: put(folder, "vocab.txt", "content of vocab.txz", LONG_AGO + 1), {"tokenizer_sha256"}),
        (lambda folder: put(folder, "added_tokens.json", "{}"), {"tokenizer_sha256"}),
        (lambda folder: put(folder, "README.md", "other"), set()),
        (lambda folder: put(folder, "pytorch_model.bin", "other"), set()),
    ],
)
def test_what_they_depend_on(folder: Path, change: Callable[[Path], None], changed: set[str]) -> None:
    before = vars(model_identity(str(folder)))
    change(folder)
    after = vars(model_identity(str(folder)))
    assert {name for name in before if before[name] != after[name]} == changed


def test_weights_in_parts_are_those_that_the_index_names(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    places = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    put(folder, "model.safetensors.index.json", json.dumps(places))
    put(folder, "one.safetensors", "1")
    assert model_identity(str(folder)).weights_sha256 is None
    put(folder, "two.safetensors", "2")
    put(folder, "three.safetensors", "3")
    files = ("config.json", "model.safetensors.index.json", "one.safetensors", "two.safetensors")
    assert model_identity(str(folder)).weights_sha256 == expected(folder, *files)


def test_files_are_hashed_once_and_again_when_they_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_identity(str(folder))
    hashed: list[str] = []
    hash_file = hashlib.file_digest

    def noted(opened: object, name: str) -> object:
        hashed.append(Path(opened.name).name)
        return hash_file(opened, name)

    monkeypatch.setattr(fingerprints.hashlib, "file_digest", noted)
    assert model_identity(str(folder)) == before
    assert hashed == []
    put(folder, "model.safetensors", "content of model.safetensorZ", LONG_AGO + 1)  # as many bytes
    assert model_identity(str(folder)).weights_sha256 == expected(folder, "config.json", "model.safetensors")
    assert hashed == ["model.safetensors"]

    # What was just written may change again in the same moment: it is not remembered.
    hashed.clear()
    for content in ("first", "other"):
        now = time.time_ns()
        put(folder, "model.safetensors", content, now)
        assert model_identity(str(folder)).weights_sha256 == expected(folder, "config.json", "model.safetensors")
    assert hashed == ["model.safetensors"] * 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', '{"FILE": [28, 0, "wrong"]}', "\ud800"])
def test_what_is_remembered_may_be_damaged_or_gone(folder: Path, content: str) -> None:
    before = model_identity(str(folder))
    path = digests_path()
    assert path is not None
    remembered = json.loads(path.read_text())
    assert {Path(key).name for key in remembered} == {"config.json", "model.safetensors", "tokenizer.json", "vocab.txt"}
    path.write_bytes(content.replace("FILE", str(folder / "config.json")).encode(errors="surrogatepass"))
    assert model_identity(str(folder)) == before
    assert json.loads(path.read_text()) == remembered
    path.unlink()
    path.mkdir()  # cannot be written
    assert model_identity(str(folder)) == before


def test_where_there_is_nothing_it_is_unknown(folder: Path) -> None:
    absent = model_identity("org/not-on-this-machine")
    assert (absent.weights_sha256, absent.tokenizer_sha256) == (None, None)
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    assert model_identity(str(folder)).tokenizer_sha256 is None
    embedded = model_identity("kvdrift/tiny")
    assert embedded.weights_sha256
    assert embedded.tokenizer_sha256
