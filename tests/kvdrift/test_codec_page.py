"""``docs/adding-a-codec.md`` and ``docs/codecs.md``: the class holds the checks of codecs, the actions can be made."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from fixtures.house import ROOT

from generator.actions import CODEC_KIND, build_action
from generator.checks.codecs import CODEC_CHECKS, CodecSubject
from generator.codecs import CODECS, Codec
from generator.codecs.quantized_cache import QuantizedCacheCodec
from schema.study import ActionSection

OWN, THERE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("adding-a-codec.md", "codecs.md"))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def test_the_pages_do_as_they_say(tmp_path: Path) -> None:
    (code,) = (text for kind, text in BLOCK.findall(OWN) if kind == "python")
    (tmp_path / "my_codec.py").write_text(code, encoding="utf-8")
    written = [text for page in (OWN, THERE) for kind, text in BLOCK.findall(page) if kind == "toml"]
    sections = [ActionSection.model_validate(one) for text in written for one in tomllib.loads(text)["actions"]]
    own = [section for section in sections if not needs_library(section)]
    actions = {section.name: build_action(section, tmp_path) for section in own}
    assert list(actions) == ["finer-keys", "finer-keys-16", "int4", "int4-wide", "snapkv-half-int8", "int4-throughout"]
    assert actions["int4-throughout"].generated is not None
    subject = CodecSubject("my_codec:FinerKeys", folder=tmp_path)
    assert [finding.found for check in CODEC_CHECKS[:4] if not (finding := check(subject)).holds] == []
    assert CODEC_KIND.group in OWN


@pytest.mark.quantizers
def test_the_pages_actions_with_a_library_can_be_made() -> None:
    written = [text for kind, text in BLOCK.findall(THERE) if kind == "toml"]
    sections = [ActionSection.model_validate(one) for text in written for one in tomllib.loads(text)["actions"]]
    assert [build_action(section).codec_name for section in sections if needs_library(section)] == ["hqq-int4"]


def needs_library(section: ActionSection) -> bool:
    return issubclass(CODECS.get(str(section.codec_name), Codec), QuantizedCacheCodec)


def test_every_codec_is_on_the_page() -> None:
    named = {name for line in THERE.splitlines() if line.startswith("## ") for name in line[3:].split(", ")}
    assert set(CODECS) <= named
