"""Every selector passes the checks of ``kvdrift check``, and every check fails a selector that breaks its promise.

Registering a selector adds it here. Presses of kvpress are added by listing them as pure selections; they are marked
``kvpress`` and run by ``make kvpress``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from fixtures.own_selectors import write_module
from fixtures.part_checks import of_this_process
from fixtures.refusals import refused

from kvdrift.generator.checks.selectors import SelectorTrial
from kvdrift.generator.checks.trial import Check
from kvdrift.generator.selectors import SELECTORS, Selector
from kvdrift.generator.selectors.kvpress import PRESSES

NAMES = [*SELECTORS, *(pytest.param(f"kvpress:{press}", marks=pytest.mark.kvpress) for press in PRESSES)]
BY_NAME = {check.name: check for check in SelectorTrial.checks}


@cache
def trial_of(name: str) -> SelectorTrial:
    """The selector with its default parameters, and the prompts that its checks share."""
    return SelectorTrial(name)


@pytest.mark.parametrize("check", [*of_this_process(SelectorTrial.checks)], ids=lambda check: check.name)
@pytest.mark.parametrize("name", NAMES)
def test_every_selector_holds(name: str, check: Check[Selector]) -> None:
    finding = check(trial_of(name))
    assert finding.holds, finding.line
    if check.name == "identity":
        options = trial_of(name).options
        texts = [key for key, value in options.items() if isinstance(value, str)]  # whose other values are not guessed
        tried = ", ".join(key for key in options if key not in texts) or "no parameter"
        left = f"; no other value tried of {', '.join(texts)}" if texts else ""
        assert finding.line == tried + left


SCORE = "return layer.key[..., self.coordinate].float() * self.sign"
KEEP = "\n    def keep(self, layer, kept):\n        "
COUNTED = """

@dataclass(frozen=True)
class Counted:
    def update(self, gathered, chunk):
        return (gathered or 0) + 1
"""


@pytest.mark.parametrize(
    ("check", "change", "says"),
    [
        ("kept sets", (SCORE, SCORE + "\n" + KEEP + "return super().keep(layer, kept).flip(-1)"), "selector Mine: wrong positions in layer 0"),
        ("kept sets", (SCORE, SCORE + "\n\n    def budgets(self, kept, entries, layers):\n        return [kept] * (layers - 1)"), "do not sum to m x layers"),
        ("kept sets", (SCORE, f"import torch\n        with torch.inference_mode():\n            layer.value.mul_(2)\n        {SCORE}"), "keys or values were changed in place"),
        ("kept sets", (SCORE, "return layer.keys"), "AttributeError: 'PromptLayer' object has no attribute 'keys' ("),
        ("other models", (SCORE, "return layer.key[:1, :, 0]"), "selector Mine: scores of shape [1, 200]; 4 KV heads and 200 prompt entries need [4, 200]"),
        ("kept sets", (SCORE, "return layer.key[..., 0] / 0 * 0"), "selector Mine: a score in layer 0 is not finite"),
        ("kept sets", (SCORE, "return (layer.key[..., 0].float().abs() * 1e4).exp()"), "selector Mine: a score in layer 0 is not finite"),
        ("other models", (SCORE, "return layer.key[..., 0] + layer.window_query.numpy()[0, :1, 0]"), "Got unsupported ScalarType BFloat16"),
        ("repetition", (SCORE, "import torch\n        return torch.rand_like(layer.key[..., 0])"), "a second choice is another one"),
        ("repetition", (SCORE, "import torch\n        torch.rand(1)\n        return layer.key[..., 0]"), "numbers are drawn from torch's own state"),
        ("other actions", (SCORE, "return layer.key.float() @ layer.window_query.float().mean((0, 1))"), "the sets are others"),
        ("identity", (SCORE, SCORE + "\n\n    def identity(self):\n        return super().identity() | {'parameters': {'sign': self.sign}}"), "coordinate is no part of the identity"),
        ("identity", (SCORE, SCORE + "\n\n    def identity(self):\n        return {'parameters': {}}"), "identity() has other columns"),
        ("embedded model", (SCORE, "assert layer.key.shape[1] != 396\n        " + SCORE), "AssertionError"),
    ],
)  # fmt: skip
def test_a_broken_selector_fails_the_check_of_what_it_breaks(
    check: str, change: tuple[str, str], says: str, tmp_path: Path
) -> None:
    path = write_module(tmp_path, change)
    finding = BY_NAME[check](SelectorTrial("my_selector:Mine", folder=tmp_path))
    assert not finding.holds
    assert says in finding.line
    if says.endswith("("):  # an exception, with its place
        assert f"({path}, line {path.read_text().splitlines().index('        return layer.keys') + 1})" in finding.line


def test_a_sum_that_depends_on_chunks_fails(tmp_path: Path) -> None:
    asked = "\n\n    @property\n    def statistics(self):\n        return (Counted(),)\n"
    counted = f"return {SCORE.removeprefix('return ')} * (3 - layer.gathered(Counted()))"
    write_module(tmp_path, ("\n\n@dataclass", COUNTED + "\n\n@dataclass"), (SCORE, counted + asked))
    trial = SelectorTrial("my_selector:Mine", folder=tmp_path)
    assert BY_NAME["kept sets"](trial).holds
    assert "the sets are others" in BY_NAME["chunks"](trial).line


def test_prompts_grow_with_window_and_sinks(tmp_path: Path) -> None:
    field = "coordinate: int = 0\n    window: int = 8"
    write_module(tmp_path, ("coordinate: int = 0", field))
    wide = SelectorTrial("my_selector:Mine", {"window": 300}, tmp_path)
    assert [kept > 300 and entries > kept for entries, kept in wide.sizes] == [True] * 4
    findings = [check(wide) for check in of_this_process(SelectorTrial.checks)]
    assert [finding.line for finding in findings if not finding.holds] == []
    line = refused(SelectorTrial, "my_selector:Mine", {"window": 1000}, tmp_path)
    assert line.startswith("window (1000) and sinks (0) are more than the 900 that the checks have prompts for")
