"""Every policy passes the checks of ``kvdrift check``, and every check fails a policy that breaks its promise.

Registering a policy adds it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fixtures.own_policies import MODULE
from fixtures.own_selectors import write_module
from fixtures.part_checks import of_this_process
from fixtures.refusals import refused

from kvdrift.generator.checks.policies import PolicyTrial
from kvdrift.generator.checks.trial import Check
from kvdrift.generator.selectors.policies import POLICIES, Policy, Sliding

BY_NAME = {check.name: check for check in PolicyTrial.checks}
NAME = "my_policy:Mine"


@cache
def trial_of(name: str) -> PolicyTrial:
    """The policy with its default parameters, one for all checks."""
    return PolicyTrial(name)


def policies_and_checks() -> Iterator[Any]:
    """Return all pairs; of policies that score, the longest checks are slow if a second one would show no more."""
    longest = {"company", "embedded model"}
    left_out = {"h2o": longest, "tova": longest}
    for name, check in product(POLICIES, of_this_process(PolicyTrial.checks)):
        slow = check.name in left_out.get(name, ())
        yield pytest.param(name, check, id=f"{name}-{check.name}", marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "check"), policies_and_checks())
def test_every_policy_holds(name: str, check: Check[Policy]) -> None:
    finding = check(trial_of(name))
    assert finding.holds, finding.line
    if check.name == "identity":
        assert finding.line == (", ".join(trial_of(name).part.parameters) or "no parameter")


def own(folder: Path, *changes: tuple[str, str], text: str = MODULE) -> PolicyTrial:
    """A policy of a module with some of its text replaced."""
    write_module(folder, *changes, name="my_policy", text=text)
    return PolicyTrial(NAME, folder=folder)


SCORED = "return scores / 2 + self.share * weights.mean(2)"


@pytest.mark.parametrize(
    ("check", "change", "says"),
    [
        ("company", (SCORED, "return scores / 2 + weights.mean((0, 2))"), "events are others"),
        ("repetition", (SCORED, SCORED + " + torch.rand_like(scores)"), "a second run's events are others"),
        ("repetition", (SCORED, SCORED + " + 0 * torch.rand_like(scores)"), "numbers are drawn from torch's own state"),
        ("identity", ("share: float", "share: ClassVar[float]"), None),
        ("entries read", (SCORED, "return scores - weights.mean(2)"), "policy Mine: scores at step 1 should be "),
        ("entries read", (SCORED, "return weights.mean(2).log()"), "finite numbers that are not negative"),
        ("entries read", (SCORED, "return weights"), "policy Mine: "),
        ("entries read", ("TOVA().score(layer)", "TOVA().score(layer)[:, :9]"), "policy Mine: "),
        ("entries read", ("TOVA().score(layer)", "-TOVA().score(layer)"), "scores at step 0 should be "),
        ("repetition", (SCORED, "return scores.no_such_name"), "AttributeError: 'Tensor' object has no attribute"),
        ("embedded model", (SCORED, "assert weights.shape[-1] < 290\n        " + SCORED), "AssertionError"),
    ],
)  # fmt: skip
def test_a_broken_policy_fails_the_check_of_what_it_breaks(
    check: str, change: tuple[str, str], says: str | None, tmp_path: Path
) -> None:
    finding = BY_NAME[check](own(tmp_path, change))
    assert finding.holds is (says is None), finding.line
    assert (says or "no parameter") in finding.line


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
        ("list(range(count))", "entries read", "entries are read"),
        ("list(range(count % 2, 2)) + list(range(count - self.budget + 2, count))", "entries read", "read again after it was dropped"),
        ("list(range(self.budget))", "entries read", "the entry of the token fed is not read"),
        (f"{WINDOW}[1:]", "nothing dropped", None),
        (f"{WINDOW} + [count - 1]", "entries read", "attention is not that over the entries that are read"),
    ],
)  # fmt: skip
def test_a_rule_of_ones_own_is_held_to_what_it_reads(read: str, check: str, says: str | None, tmp_path: Path) -> None:
    """The rule is a window without sinks, by attention that concatenates; variants break the promise."""
    rule = RULE.replace("READ", read)
    imports = ("import torch\n", "import torch\n\nfrom kvdrift.generator.attention.cache_rules import CacheRule\n")
    finding = BY_NAME[check](own(tmp_path, imports, text=MODULE + rule))
    assert finding.holds is (says is None), finding.line
    assert (says or "") in finding.line


def test_prompts_grow_with_what_a_policy_needs(tmp_path: Path) -> None:
    least = "share: float = 1.0\n    least: int = 90"
    subject = own(tmp_path, ("share: float = 1.0", least))
    assert min(subject.budgets) >= 90 < subject.budgets[0] < subject.entries < subject.budgets[2]
    assert BY_NAME["repetition"](subject).holds
    line = refused(PolicyTrial, NAME, {"least": 500}, tmp_path)
    assert line.startswith(f"policy '{NAME}' needs at least 500 entries, more than the 400 that the checks have")


def test_what_removes_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy whose budget is never used up is no policy."""

    @dataclass(frozen=True)
    class Lazy(Sliding):
        def rule(self, prompt: Any, kept: Any, budget: int) -> Any:
            return super().rule(prompt, kept, budget + 5)

    monkeypatch.setitem(POLICIES, "lazy", Lazy)
    finding = BY_NAME["entries read"](PolicyTrial("lazy"))
    assert not finding.holds
    assert "entries are read" in finding.line
