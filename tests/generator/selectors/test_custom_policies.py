"""Policies of one's own: found as selectors are, one line for a mistake, and an identity that follows their source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.own_policies import MODULE
from fixtures.own_selectors import write_distribution, write_module
from fixtures.refusals import refused

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.row_invariance import TriedSteps
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.identity import parts_sha256
from kvdrift.generator.selectors.policies import build_policy
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import ActionSection

NAME = "my_policy:Mine"


def made(folder: Path, *changes: tuple[str, str], keep: int | str = 20, **parameters: float) -> Action:
    """An action of a module's policy, some of its text replaced."""
    write_module(folder, *changes, name="my_policy", text=MODULE)
    return build_action(ActionSection(name="own", policy={"name": NAME, **parameters}, keep=keep), folder)


def test_a_study_finds_a_policy_and_its_first_cut(tmp_path: Path) -> None:
    action = made(tmp_path, share=0.5)
    row = action.row("s", prespecified=True)
    assert (row["selector"], row["policy"], row["policy_parameters"]) == ("full", NAME, '{"share": 0.5}')
    assert action == made(tmp_path, share=0.5) != made(tmp_path)


def test_the_identity_follows_the_source_of_policy_and_first_cut(tmp_path: Path) -> None:
    """The identity is the same after modules of another folder have been loaded."""
    (other := tmp_path / "other").mkdir()
    write_module(other, name="my_policy", text=MODULE.replace("extra: int = 1", "extra: int = 3"))
    hashes = []
    for change in (("", ""), ("scores / 2", "scores / 3"), ("extra: int = 1", "extra: int = 2")):
        action = made(tmp_path, change)
        build_policy(NAME, {}, other)
        hashes.append(parts_sha256(action.parts))
        assert parts_sha256(made(tmp_path, change).parts) == hashes[-1]
    assert len(set(hashes)) == 3
    assert parts_sha256(made(tmp_path, share=0.5).parts) not in hashes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("class Mine(ScoringPolicy)", "class Mine"), "class Mine is no Policy; derive it from ScoringPolicy of kvdrift.generator.selectors.policies"),
        (("def scored", "def score"), "class Mine has no method scored; define it"),
        (("share: float = 1.0", "name: float = 1.0"), "Mine.name: [[actions]] has a key of this name already"),
        (("share: float = 1.0", "least: float = 1.0"), "Mine().least is 1.0; it should be a number"),
        (("return First()", "return 3"), "policy Mine: first_cut is of type int; it should be a selector, such as Recent()"),
        (("return First()", "return Second()"), "policy Mine: first_cut: NameError: name 'Second' is not defined ("),
        (("share: float = 1.0", "share: float = 1.0\n    keeps_scores: bool = True"), "keeps_scores: ClassVar[bool] = "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    write_module(tmp_path, change, name="my_policy", text=MODULE)
    line = refused(build_action, ActionSection(name="own", policy=NAME, keep=20), tmp_path)
    assert line.startswith("action 'own': ")
    assert str(tmp_path / "my_policy.py") in line or says.startswith("policy Mine: first_cut")
    assert says in line


def line_of_run(action: Action) -> str:
    """The line with which a run of the action fails."""
    pending, document = [PendingUnit(action, 0, 1)], random_document("own", 40)
    return refused(generate_units, random_model("llama"), "s", document, pending, 4, 3, error=OperationError)


def test_what_fails_in_a_run_has_its_line(tmp_path: Path) -> None:
    line = line_of_run(made(tmp_path, ("scores / 2", "scores / 2 + self.half")))
    texts = (tmp_path / "my_policy.py").read_text().splitlines()
    where = texts.index("        return scores / 2 + self.half + self.share * weights.mean(2)") + 1
    assert line.startswith("policy Mine: AttributeError: ")
    assert line.endswith(f" ({tmp_path}/my_policy.py, line {where})")


BEFORE_RECENT = "    @property\n    def accumulates"
PROMPT_SCORES, SCORED = "return TOVA().score(layer)", "return scores / 2 + self.share * weights.mean(2)"


def recent(value: str) -> tuple[str, str]:
    return BEFORE_RECENT, f"    def recent(self, budget: int) -> int:\n        return {value}\n\n{BEFORE_RECENT}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (recent("21"), "recent(20) is 21; "),
        (recent("0"), "recent(20) is 0; "),
        (recent("2.5"), "recent(20) is 2.5; "),
        ((PROMPT_SCORES, f"{PROMPT_SCORES}[:, :39]"), "prompt_scores has the shape [2, 39]; it should be [2, 40]"),
        ((PROMPT_SCORES, f"{PROMPT_SCORES}[0]"), "prompt_scores has the shape [40]; it should be [2, 40]"),
        ((PROMPT_SCORES, "return None"), "prompt_scores is of type NoneType; "),
        ((SCORED, "return scores[..., :-1]"), "scored has the shape [1, 2, 20]; it should be [1, 2, 21]"),
    ],
)
def test_what_lies_outside_its_bounds_is_named_with_them(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    """Policy, file, value and bounds, rather than an index error inside kvdrift, or no error at all."""
    line = line_of_run(made(tmp_path, change))
    assert line.startswith(f"policy Mine: {says}")
    assert line.endswith(f" ({tmp_path}/my_policy.py)")


def test_a_policy_runs_where_no_step_was_tried_before(tmp_path: Path) -> None:
    """Whole steps are tried with its rule first, from the middle of a continuation on."""
    fresh = replace(random_model("llama"), steps=TriedSteps())
    (unit,) = generate_units(fresh, "s", random_document("own", 40), [PendingUnit(made(tmp_path), 0, 1)], 4, 3)
    assert unit.record["batch_deviation"] == 0.0


def test_a_first_cut_with_unlike_layers_is_refused(tmp_path: Path) -> None:
    pyramid = "from kvdrift.generator.selectors.pyramidkv import PyramidKV\n        return PyramidKV(window=4)"
    assert "first cut" in line_of_run(made(tmp_path, ("return First()", pyramid)))


def test_a_budget_must_hold_the_first_cuts_window(tmp_path: Path) -> None:
    action = made(
        tmp_path, ("return First()", "from kvdrift.generator.selectors import SnapKV\n        return SnapKV()"), keep=30
    )
    line = refused(action.kept_entries, 100, "here")
    assert line.endswith(f"keep = 30 lets a step read 30 entries; policy {NAME} needs at least 64")


def test_entry_points_are_listed_and_checked_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(tmp_path, name="pointed_policy", text=MODULE)
    write_distribution(tmp_path, "good", group="kvdrift.policies", halving="pointed_policy:Mine")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_policy("halving", {}) == build_policy("pointed_policy:Mine", {})
    code, out, _ = call(capsys, "list", "policies")
    rows = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0
    assert rows["halving"] == "attention that halves; share = 1.0; of good 1.0"
    assert "MODULE:CLASS" in rows
    assert "shere: unknown key; did you mean 'share'?" in mistake(capsys, "check", "halving", "--parameter", "shere=1")


def test_a_name_of_several_needs_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "check", "h2o")
    assert "--kind selector" in line
    assert "--kind policy" in line
    assert "--kind polcy: did you mean 'policy'?" in mistake(capsys, "check", "h2o", "--kind", "polcy")
    for kind in ("selector", "policy"):
        line = mistake(capsys, "check", "h2o", "--kind", kind, "--parameter", "zoom=1")
        assert f"{kind} 'h2o' has no parameter 'zoom'" in line
