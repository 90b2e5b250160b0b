"""``docs/adding-a-policy.md``: its class holds the checks of policies, its actions can be made, its commands are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fixtures.house import ROOT

from generator.actions import build_action
from generator.checks.policies import POLICY_CHECKS, PolicySubject
from generator.selectors.policies import POLICIES, POLICY_KIND
from schema.study import ActionSection

OWN, THERE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("adding-a-policy.md", "policies.md"))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def test_the_pages_do_as_they_say(tmp_path: Path) -> None:
    (code,) = (text for kind, text in BLOCK.findall(OWN) if kind == "python")
    (tmp_path / "my_policy.py").write_text(code, encoding="utf-8")
    written = [text for page in (OWN, THERE) for kind, text in BLOCK.findall(page) if kind == "toml"]
    sections = [ActionSection.model_validate(one) for text in written for one in tomllib.loads(text)["actions"]]
    actions = {section.name: build_action(section, tmp_path) for section in sections}
    assert list(actions) == ["fading-half", "fading-fast", "sliding-512", "sliding-sinks"]
    subject = PolicySubject("my_policy:Fading", folder=tmp_path)
    assert [finding.found for check in POLICY_CHECKS[:2] if not (finding := check(subject)).holds] == []
    assert POLICY_KIND.group in OWN


def test_every_policy_is_on_the_page() -> None:
    assert {line[3:] for line in THERE.splitlines() if line.startswith("## ")} >= set(POLICIES)
