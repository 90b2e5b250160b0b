"""Steps of fixed shape by a policy's rule: the same entries are dropped as by the usual steps, attention is as near."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, assert_near, assert_same_kept
from fixtures.own_policies import MODULE
from fixtures.own_selectors import write_module
from torch import Tensor

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention import shared_prefix
from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.parts import PLAIN, LayerTerms
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.row_invariance import TriedSteps
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors.h2o import AccumulatedAttention
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.transformer.prompts import document
from kvdrift.log.store import Unit
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import PLAIN as PLAIN_ROLLOUT
from kvdrift.schema.tables import SWRB

PROMPT, HORIZON, STREAMS, KV_HEADS, GROUP, SIZE = 20, 14, 3, 2, 2, 8
NAMES = pytest.mark.parametrize("name", POLICIES)
TERMS = {
    "plain": PLAIN, "softcap": LayerTerms(softcap=1.5), "sinks": LayerTerms(sinks=torch.tensor([0.5, 2.0, -1.0, 1.0])),
}  # fmt: skip


def rule_over(name: str, budget: int, generator: torch.Generator) -> CacheRule:
    """A policy's rule over a random prompt, all of which is kept."""
    key, value = torch.randn(2, KV_HEADS, PROMPT, SIZE, generator=generator)
    query = torch.randn(KV_HEADS * GROUP, 1, SIZE, generator=generator)
    received = {AccumulatedAttention(): torch.rand(KV_HEADS, PROMPT, generator=generator, dtype=torch.float64)}
    layer = PromptLayer(key, value, query, 0.7, statistics=received)
    return POLICIES[name]().rule([layer], [torch.arange(PROMPT).expand(KV_HEADS, -1)], budget)


@NAMES
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("budget", [12, PROMPT, PROMPT + 5, PROMPT + HORIZON])
def test_a_rule_decides_and_attends_as_with_cut_suffixes(name: str, terms: LayerTerms, budget: int) -> None:
    """The same entries are dropped; attention differs by rounding, as sums over more terms have another order."""
    generator = torch.Generator().manual_seed(budget)
    rule = rule_over(name, budget, generator)
    key, value = torch.randn(2, KV_HEADS, PROMPT, SIZE, generator=generator)
    own = torch.randn(2, STREAMS, KV_HEADS, HORIZON, SIZE, generator=generator)
    scores = torch.zeros(STREAMS, KV_HEADS, rule.scores)
    if rule.scores:
        scores[:] = rule.first_scores(0)
    steady_scores = torch.nn.functional.pad(scores, (0, HORIZON)) if rule.scores else torch.empty(0)
    replaced = []
    for length in range(1, HORIZON + 1):
        query, usual = torch.randn(2, STREAMS, KV_HEADS, GROUP, SIZE, generator=generator)
        if rule.scores:
            scores = torch.nn.functional.pad(scores, (0, 1))  # the new entry's score
            steady_scores[..., PROMPT + length - 1 :] = 0.0
        cut, zeroed = own[:, :, :, :length], own.clone()
        zeroed[:, :, :, length:] = 0.0
        steady, steady_scores = rule.attend_steadily(
            StreamEntries(0, query, key, value, *zeroed, 0.7, STREAMS, terms), steady_scores, torch.tensor([length]),
            usual,
        )  # fmt: skip
        replaced.append(rule.replaces(length))
        if not replaced[-1]:
            assert torch.equal(steady, usual)
        if rule.passes(length):
            continue
        attention, scores = rule.attend(StreamEntries(0, query, key, value, *cut, 0.7, STREAMS, terms), scores)
        if replaced[-1]:
            torch.testing.assert_close(steady, attention, rtol=1e-6, atol=1e-6)
        if rule.scores:
            torch.testing.assert_close(steady_scores[..., : PROMPT + length], scores, rtol=0.0, atol=1e-6)
    assert replaced == [length > budget - PROMPT for length in range(1, HORIZON + 1)]


# --- Whole rollouts -------------------------------------------------------------------------------------------------

LENGTH, STEPS, SEED = 197, 28, 3
# Half of the prompt, fewer entries than are generated, and a number that is reached after some tokens.
BUDGETS = (LENGTH // 2, 20, LENGTH + 9)


def policy_action(name: str, keep: int) -> Action:
    """An action of that policy and m."""
    return build_action(ActionSection(name=f"{name}-{keep}", policy={"name": name}, keep=keep))


def generated(actions: list[Action], sharing: SharingOptions, estimator: str, count: int = 3) -> list[Unit]:
    pending = [PendingUnit(action, 0, count, estimator) for action in actions]
    prompt = random_document(f"d{LENGTH}", LENGTH)
    return generate_units(random_model("llama"), "s", prompt, pending, STEPS, SEED, sharing)


def test_steps_that_cannot_be_graphs_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a custom policy and a codec of generated entries are named; policies of kvdrift are not."""
    write_module(tmp_path, text=MODULE, name="my_policy")
    sections: list[dict[str, Any]] = [
        {"policy": {"name": "my_policy:Mine"}, "keep": 20},
        {"codec": {"name": "int4", "residual": 0, "generated": True}},
        {"policy": {"name": "h2o"}, "keep": 20},
    ]
    actions = [build_action(ActionSection(name=f"a{n}", **own), tmp_path) for n, own in enumerate(sections)]
    monkeypatch.setattr(document, "captures", lambda _device: True)
    for chosen, beginnings in ((actions, ["policy Mine is custom", "a codec codes"]), (actions[2:], [])):
        said: list[str] = []
        model = replace(random_model("llama"), steps=TriedSteps(say=said.append))
        for name in ("first", "second"):
            pending = [PendingUnit(action, 0, 1) for action in chosen]
            generate_units(model, "s", random_document(name, 60), pending, 4, SEED, SharingOptions(fused=True))
        assert [line.split(" (")[1].startswith(it) for line, it in zip(said, beginnings, strict=True)] == [True] * len(
            said
        )


def with_nan(*arguments: Any) -> tuple[list[Tensor], list[shared_prefix.Suffixes]]:
    """Suffix buffers in memory that held no numbers before."""
    buffers, suffixes = BUFFERS(*arguments)
    for buffer in buffers:
        buffer.fill_(torch.nan)
    return buffers, suffixes


BUFFERS = shared_prefix.suffix_buffers


@pytest.mark.parametrize("estimator", [PLAIN_ROLLOUT, SWRB])
@pytest.mark.parametrize("name", [*POLICIES, "all"])
@pytest.mark.by_default("all-plain", "h2o-swrb")
def test_events_and_counts_are_those_of_steps_with_cut_suffixes(
    name: str, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are equal, delta and f differ by less than 1e-5, and equally many streams still have every entry."""
    names = POLICIES if name == "all" else [name]
    actions = [policy_action(one, budget) for one in names for budget in BUDGETS] + [HALF_SNAPKV, CONTROL]
    plain = generated(actions, SHARE_ALL, estimator)
    monkeypatch.setattr(shared_prefix, "suffix_buffers", with_nan)
    for unit, twin in zip(generated(actions, SharingOptions(fused=True), estimator), plain, strict=True):
        assert_near(unit, twin)
        assert_same_kept(unit, twin)
