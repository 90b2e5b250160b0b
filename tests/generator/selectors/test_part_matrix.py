"""Every selector, codec and policy passes the checks of ``kvdrift check``, and each check fails what breaks its promise.

Registering a part adds it here. Presses of kvpress are marked ``kvpress`` and run by ``make kvpress``, codecs of hqq are
marked ``quantizers`` and run by ``make quantizers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fixtures import own_codecs, own_policies, own_selectors
from fixtures.own_selectors import write_module
from fixtures.part_checks import of_this_process
from fixtures.refusals import refused

from kvdrift.generator.checks.codecs import CodecTrial
from kvdrift.generator.checks.kinds import trial_of
from kvdrift.generator.checks.policies import PolicyTrial
from kvdrift.generator.checks.selectors import SelectorTrial
from kvdrift.generator.checks.trial import Check, Trial
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.kvpress import PRESSES
from kvdrift.generator.selectors.policies import POLICIES

TRIALS: dict[str, type[Trial[Any]]] = {"selector": SelectorTrial, "codec": CodecTrial, "policy": PolicyTrial}
NAMES: dict[str, Iterable[str]] = {
    "selector": [*SELECTORS, *(f"kvpress:{press}" for press in PRESSES)], "codec": CODECS, "policy": POLICIES,
}  # fmt: skip
MODULES = {"selector": own_selectors.MODULE, "codec": own_codecs.MODULE, "policy": own_policies.MODULE}
# By default only these parts have the longest checks, one of each kind of code.
BY_DEFAULT = {
    "company": {"sliding"}, "embedded model": {"snapkv", "int8", "sliding"}, "entries read": {"sliding", "h2o"},
    "nothing dropped": {"sliding", "h2o"}, "other models": {"snapkv", "recent", "expected_attention"},
    "generated entries": {"int8", "nvfp4", "turboquant"},
}  # fmt: skip


@cache
def trial(kind: str, name: str) -> Trial[Any]:
    """The part with its default parameters, one for all checks."""
    return TRIALS[kind](name)


def parts_and_checks() -> Iterator[Any]:
    for kind, some in TRIALS.items():
        for name, check in product(NAMES[kind], of_this_process(some.checks)):
            marks = [pytest.mark.kvpress] * name.startswith("kvpress:") + [pytest.mark.quantizers] * name.startswith(
                "hqq-"
            )
            marks += [pytest.mark.slow] * (name not in BY_DEFAULT.get(check.name, {name}))
            yield pytest.param(kind, name, check, id=f"{kind}-{name}-{check.name}", marks=marks)


@pytest.mark.parametrize(("kind", "name", "check"), parts_and_checks())
def test_every_part_holds(kind: str, name: str, check: Check) -> None:
    """The identity has every parameter of which another value can be guessed: no text or version, no multiple of 4."""
    finding = check(trial(kind, name))
    assert finding.holds, finding.line
    if check.name == "identity":
        part = trial(kind, name)
        parameters = part.options
        left = [
            one
            for one, value in parameters.items()
            if (isinstance(value, str) and one not in getattr(part.part, "choices", {}))
            or (name, one) == ("hqq-int2", "group")
        ]
        tried = ", ".join(one for one in parameters if one not in left) or "no parameter"
        assert finding.line == tried + (f"; no other value tried of {', '.join(left)}" if left else "")


@cache
def shared_trial(name: str) -> SelectorTrial:
    """The selector with head budgets, one for all checks."""
    return SelectorTrial(name, {"budget": "adakv"})


@pytest.mark.parametrize("check", of_this_process(SelectorTrial.checks), ids=lambda check: check.name)
@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pyramidkv", "h2o", "tova", "expected_attention")),
    ],
)
def test_head_budgets_hold(name: str, check: Check) -> None:
    finding = check(shared_trial(name))
    assert finding.holds, finding.line
    if check.name in {"kept sets", "other models"}:
        assert finding.line.startswith("the heads of a layer keep m on average, such as [[")


def own(kind: str, folder: Path, *changes: tuple[str, str], text: str = "", **parameters: Any) -> Trial[Any]:
    """A part of a module with some of its text replaced."""
    write_module(folder, *changes, name="mine", text=text or MODULES[kind])
    return TRIALS[kind]("mine:Mine", parameters, folder)


def found(part: Trial[Any], check: str) -> Any:
    return next(one for one in part.checks if one.name == check)(part)


SCORE = "return layer.key[..., self.coordinate].float() * self.sign"
KEEP = "\n    def keep(self, layer, kept):\n        "
COUNTED = """

@dataclass(frozen=True)
class Counted:
    def update(self, gathered, chunk):
        return (gathered or 0) + 1
"""


SCORED = "return scores / 2 + self.share * weights.mean(2)"


@pytest.mark.parametrize(
    ("kind", "check", "change", "says"),
    [
        # Selectors
        ("selector", "kept sets", (SCORE, SCORE + "\n" + KEEP + "return super().keep(layer, kept).flip(-1)"), "selector Mine: wrong positions in layer 0"),
        ("selector", "kept sets", (SCORE, SCORE + "\n\n    def budgets(self, kept, entries, layers):\n        return [kept] * (layers - 1)"), "do not sum to m x layers"),
        ("selector", "kept sets", (SCORE, f"import torch\n        with torch.inference_mode():\n            layer.value.mul_(2)\n        {SCORE}"), "keys or values were changed in place"),
        ("selector", "kept sets", (SCORE, "return layer.keys"), "AttributeError: 'PromptLayer' object has no attribute 'keys' ("),
        ("selector", "other models", (SCORE, "return layer.key[:1, :, 0]"), "selector Mine: scores of shape [1, 200]; 4 KV heads and 200 prompt entries need [4, 200]"),
        ("selector", "kept sets", (SCORE, "return (layer.key[..., 0].float().abs() * 1e4).exp()"), "selector Mine: a score in layer 0 is not finite"),
        ("selector", "other models", (SCORE, "return layer.key[..., 0] + layer.window_query.numpy()[0, :1, 0]"), "Got unsupported ScalarType BFloat16"),
        ("selector", "repetition", (SCORE, "import torch\n        return torch.rand_like(layer.key[..., 0])"), "a second choice from the same prompt keeps other positions"),
        ("selector", "repetition", (SCORE, "import torch\n        torch.rand(1)\n        return layer.key[..., 0]"), "random numbers are drawn from torch's global state"),
        ("selector", "other actions", (SCORE, "return layer.key.float() @ layer.window_query.float().mean((0, 1))"), "queries and statistics for other selectors"),
        ("selector", "identity", (SCORE, SCORE + "\n\n    def identity(self):\n        return super().identity() | {'parameters': {'sign': self.sign}}"), "coordinate is no part of the identity"),
        ("selector", "identity", (SCORE, SCORE + "\n\n    def identity(self):\n        return {'parameters': {}}"), "identity() has other columns"),
        ("selector", "embedded model", (SCORE, "assert layer.key.shape[1] != 396\n        " + SCORE), "AssertionError"),
        # Codecs
        ("codec", "shapes", ("(numbers / self.step)", "numbers.div_(self.step)"), "keys or values were changed in place"),
        ("codec", "shapes", ("* self.step\n", "* self.step if part == 'keys' else numbers[..., :8]\n"), "codec Mine: values come back as"),
        ("codec", "shapes", ("* self.step\n", "/ 0\n"), "codec Mine: keys come back with a number that is not finite"),
        ("codec", "shapes", ("self.step).round()", "self.stepp).round()"), "AttributeError: 'Mine' object has no attribute 'stepp' ({path}, line 18)"),
        ("codec", "bytes", ("numbers.numel(), 1)", "numbers.numel() + int(numbers.sum() > 0), 1)"), "meta tensors"),
        ("codec", "bytes", ("numbers.numel(), 1)", "numbers.numel() / 2, 1)"), "stored_bytes returned StoredBytes(payload="),
        ("codec", "least bytes", ("numbers.numel(), 1)", "0)"), "float32: stored_bytes reports 0.00 bits a number, too few: numbers read back with errors so small need at least 2.7"),
        ("codec", "least bytes", ("(numbers / self.step).round() * self.step", "numbers"), "float32: stored_bytes reports 8.00 bits a number, too few: numbers read back with errors so small need at least 25."),
        ("codec", "least bytes", ("(numbers / self.step).round() * self.step", "0 * numbers"), None),
        ("codec", "repetition", (".round()", ".add(torch.rand(1)).round()"), "a second round trip of the same entries, or an equal codec's, gives other numbers"),
        ("codec", "repetition", (".round()", ".add(0 * torch.rand(1)).round()"), "random numbers are drawn from torch's global state"),
        ("codec", "identity", ("step: float", "step: ClassVar[float]"), None),
        ("codec", "generated entries", ("step: float = 0.5", "step: float = 0.25"), None),
        # Policies
        ("policy", "company", (SCORED, "return scores / 2 + weights.mean((0, 2))"), "has other events alone"),
        ("policy", "repetition", (SCORED, SCORED + " + torch.rand_like(scores)"), "a second run, with an equal policy, has other events"),
        ("policy", "repetition", (SCORED, SCORED + " + 0 * torch.rand_like(scores)"), "random numbers are drawn from torch's global state"),
        ("policy", "identity", ("share: float", "share: ClassVar[float]"), None),
        ("policy", "entries read", (SCORED, "return scores - weights.mean(2)"), "policy Mine: scores at step 1 should be "),
        ("policy", "entries read", ("TOVA().score(layer)", "-TOVA().score(layer)"), "scores at step 0 should be "),
        ("policy", "embedded model", (SCORED, "assert weights.shape[-1] < 290\n        " + SCORED), "AssertionError"),
    ],
)  # fmt: skip
def test_a_broken_part_fails_the_check_of_what_it_breaks(
    kind: str, check: str, change: tuple[str, str], says: str | None, tmp_path: Path
) -> None:
    """An exception comes with its place; what is not broken holds."""
    finding = found(own(kind, tmp_path, change), check)
    assert finding.holds is (says is None), finding.line
    said = says or {"identity": "no parameter"}.get(check, "")
    assert said.replace("{path}", f"{tmp_path}/mine.py") in finding.line


def test_a_sum_that_depends_on_chunks_fails(tmp_path: Path) -> None:
    asked = "\n\n    @property\n    def statistics(self):\n        return (Counted(),)\n"
    counted = f"return {SCORE.removeprefix('return ')} * (3 - layer.gathered(Counted()))"
    mine = own("selector", tmp_path, ("\n\n@dataclass", COUNTED + "\n\n@dataclass"), (SCORE, counted + asked))
    assert found(mine, "kept sets").holds
    assert "in 5 chunks and not in one; sum in float64" in found(mine, "chunks").line


def test_prompts_grow_with_window_and_sinks(tmp_path: Path) -> None:
    wide: Any = own(
        "selector", tmp_path, ("coordinate: int = 0", "coordinate: int = 0\n    window: int = 8"), window=300
    )
    assert [kept > 300 and entries > kept for entries, kept in wide.sizes] == [True] * 4
    assert found(wide, "kept sets").holds
    assert "900" in refused(SelectorTrial, "mine:Mine", {"window": 1000}, tmp_path)


RULE = """

    def rule(self, prompt, kept, budget):
        return Slices(budget, kept[0].shape[1])


@dataclass(frozen=True)
class Slices(CacheRule):
    budget: int
    entries: int

    def over(self, entries, kv_heads):
        return Slices(entries, entries)

    def passes(self, length):
        return self.entries + length <= self.budget

    def replaces(self, length):
        return not self.passes(length)

    def attend(self, entries, scores):
        key = torch.cat([entries.prompt_key.expand(len(entries.query), -1, -1, -1), entries.suffix_key], 2)
        value = torch.cat([entries.prompt_value.expand(len(entries.query), -1, -1, -1), entries.suffix_value], 2)
        read = self.read(key.shape[2])
        weights = (entries.query * entries.scaling @ key[:, :, read].transpose(-1, -2)).softmax(-1)
        return weights @ value[:, :, read], scores

    def read(self, count):
        return READ
"""
WINDOW = "list(range(count - self.budget, count))"


@pytest.mark.parametrize(
    ("read", "check", "says"),
    [
        (WINDOW, "entries read", None),
        ("list(range(count))", "entries read", "entries are read, more than m"),
        ("list(range(count % 2, 2)) + list(range(count - self.budget + 2, count))", "entries read", "read again after it was dropped"),
        ("list(range(self.budget))", "entries read", "a KV head does not read the entry of the token being fed"),
        (f"{WINDOW}[1:]", "nothing dropped", None),
        (f"{WINDOW} + [count - 1]", "entries read", "attention differs from softmax attention to the entries that it reads"),
    ],
)  # fmt: skip
def test_a_rule_of_ones_own_is_held_to_what_it_reads(read: str, check: str, says: str | None, tmp_path: Path) -> None:
    """The rule is a window without sinks, by attention that concatenates; variants break the promise."""
    imports = ("import torch\n", "import torch\n\nfrom kvdrift.generator.attention.cache_rules import CacheRule\n")
    finding = found(own("policy", tmp_path, imports, text=own_policies.MODULE + RULE.replace("READ", read)), check)
    assert finding.holds is (says is None), finding.line
    assert (says or "") in finding.line


def test_prompts_grow_with_what_a_policy_needs(tmp_path: Path) -> None:
    least = "share: float = 1.0\n    least: int = 90"
    mine: Any = own("policy", tmp_path, ("share: float = 1.0", least))
    assert min(mine.budgets) >= 90 < mine.budgets[0] < mine.entries < mine.budgets[2]
    assert found(mine, "repetition").holds
    assert "400" in refused(PolicyTrial, "mine:Mine", {"least": 500}, tmp_path)


def test_a_module_is_found_to_have_a_codec(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(own_codecs.MODULE)
    made = trial_of("mine:Mine", {"step": 0.25}, tmp_path)
    assert (type(made), made.options) == (CodecTrial, {"step": 0.25})
