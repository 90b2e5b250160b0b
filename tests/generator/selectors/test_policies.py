"""Every registered decode-time policy: its dropped entries, compared with a plain loop.

``test_part_matrix.py`` has the checks that every policy must pass, whatever it drops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.common_actions import (
    CONTROL,
    HALF_RECENT,
    HALF_SNAPKV,
    assert_like_plain,
    eager_network,
    steps_of,
)
from fixtures.refusals import refused
from oracles.plain_policies import PlainPolicy, PlainStream, plain_policy_rollout

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.cache_rules import StreamEntries
from kvdrift.generator.attention.parts import LayerTerms
from kvdrift.generator.checks.random_models import EOS_TOKENS, random_document, random_model
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors.policies import POLICIES
from kvdrift.generator.selectors.policies.around import watched_steps
from kvdrift.generator.selectors.policies.sliding import Sliding
from kvdrift.log.store import Unit
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import PLAIN

HORIZON, LENGTH, SEED = 28, 197, 3
# Half of the prompt, fewer entries than there are generated ones, and more than the prompt has: then all is kept at first.
BUDGETS = (LENGTH // 2, 20, LENGTH + 3)
NAMES = pytest.mark.parametrize("name", POLICIES)


def policy_action(name: str, keep: int | str, **parameters: Any) -> Action:
    """An action of that policy and m, as a study file names it."""
    section = ActionSection(name=f"{name}-{keep}".replace("/", "-"), policy={"name": name, **parameters}, keep=keep)
    return build_action(section)


def generate(
    actions: list[Action], sharing: SharingOptions = SHARE_ALL, count: int = 8, estimator: str = PLAIN
) -> list[Unit]:
    pending = [PendingUnit(action, 0, count, estimator) for action in actions]
    document = random_document(f"d{LENGTH}", LENGTH)
    return generate_units(random_model("llama"), "s", document, pending, HORIZON, SEED, sharing)


# --- Against real removal ------------------------------------------------------------------------------------------


@NAMES
@pytest.mark.by_default("h2o")
def test_a_policy_equals_real_removal(name: str) -> None:
    """Tokens are equal, and delta and f differ by less than 1e-5, as with the plain twin of evictions."""
    document, count = random_document(f"d{LENGTH}", LENGTH), 2
    actions = [policy_action(name, budget) for budget in BUDGETS]
    for unit, budget in zip(generate(actions, count=count), BUDGETS, strict=True):
        plain = plain_policy_rollout(
            eager_network(), document.tokens, PlainPolicy(name, budget), seed=SEED, document=document.doc,
            action=f"{name}-{budget}", replicates=range(count), horizon=HORIZON, eos_tokens=EOS_TOKENS,
        )  # fmt: skip
        assert_like_plain(unit, plain)
        first = budget - LENGTH + 1 if budget > LENGTH else 1  # positions, from 0, at which all is still read
        assert not plain.delta[:, :first].any() or plain.delta[:, :first].max() < 1e-12
        assert not steps_of(unit)["delta"][:, :first].any(), "exactly 0 until something is dropped"
        assert plain.delta.max() > 1e-4


@NAMES
@pytest.mark.by_default("h2o", "sliding")
def test_what_is_left_of_the_prompt_is_counted_over_streams(name: str) -> None:
    """Plain streams are fed the drawn tokens: each replicate's own Y, and X once the two have diverged, up to their ends.

    A scoring policy drops the entry that the next token replaces as soon as a step's scores are known.
    """
    document, count, budget = random_document(f"d{LENGTH}", LENGTH), 2, BUDGETS[0]
    (unit,) = generate([policy_action(name, budget)], count=count)
    steps, policy = steps_of(unit), PlainPolicy(name, budget)
    first, *later = unit.kept
    assert (first.step, first.pairs, first.counts.sum()) == (0, first.pairs, budget * first.pairs)
    expected = {step: np.zeros((first.layers, LENGTH), int) for step in watched_steps(HORIZON)}
    streams = dict.fromkeys(expected, 0)
    for k in range(count):
        x, y, x_eos, y_eos = (steps[column][k] for column in ("x_token", "y_token", "x_eos", "y_eos"))
        for side, eos in ((y, y_eos), (x, x_eos)):
            stream = PlainStream(eager_network(), document.tokens, policy)
            for step in range(1, HORIZON):
                if eos[step - 1]:
                    break
                stream.advance(int(side[step - 1]))
                is_apart = bool((x[:step] != y[:step]).any())
                if step not in expected or (side is x and not is_apart):
                    continue
                streams[step] += 1
                for layer, heads in enumerate(stream.heads):
                    for head in heads:
                        places = list(head.positions)
                        if name != "sliding":
                            del places[policy.victim(places, head.scores, LENGTH + step)]
                        expected[step][layer, [place for place in places if place < LENGTH]] += 1
    assert [kept.step for kept in later] == [step for step, open_ones in streams.items() if open_ones]
    for kept in later:
        assert kept.pairs == first.pairs * streams[kept.step]
        assert (kept.counts == expected[kept.step]).all(), kept.step


def test_what_is_tried_before_the_first_step_is_no_stream() -> None:
    """A policy's first decisions are computed once more for a checksum; of one replicate there is one stream."""
    pending, document = [PendingUnit(policy_action("h2o", 20), 0, 1)], random_document(f"d{LENGTH}", LENGTH)
    (unit,) = generate_units(random_model("llama"), "s", document, pending, 6, SEED)
    first, after, *_ = unit.kept
    assert (after.step, after.pairs) == (1, first.pairs)


def test_what_a_selector_keeps_is_counted_by_position() -> None:
    actions = [HALF_SNAPKV, HALF_RECENT, CONTROL, policy_action("sliding", LENGTH + HORIZON)]
    for unit in generate(actions, count=1):
        (kept,) = unit.kept
        assert kept.counts.sum() == unit.record["kept_entries"] * kept.pairs
        assert (kept.counts <= kept.pairs // kept.layers).all()
    recent = generate([HALF_RECENT], count=1)[0].kept[0].counts
    assert set(np.flatnonzero(recent.sum(0) == 0)) == set(range(4, LENGTH - (LENGTH // 2 - 4)))


@pytest.mark.parametrize("terms", [LayerTerms(softcap=1.5), LayerTerms(sinks=torch.tensor([0.5, 2.0, -1.0, 1.0]))])
def test_a_sliding_window_has_the_soft_cap_and_the_sinks_of_its_layer(terms: LayerTerms) -> None:
    """After 9 tokens, 7 of 20 prompt entries have left the window; attention is one softmax over the 22 others."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator) for shape in [(3, 2, 2, 8), (2, 20, 8), (2, 20, 8)])
    own_key, own_value = torch.randn(2, 3, 2, 9, 8, generator=generator)
    kept = torch.arange(20).expand(2, -1)
    rule = Sliding().rule([], [kept], 22)
    attention, _ = rule.attend(StreamEntries(0, query, key, value, own_key, own_value, 0.7, 3, terms), torch.empty(0))
    seen = [*range(4), *range(11, 29)]
    keys, values = (
        torch.cat([shared.expand(3, -1, -1, -1), own], 2)[:, :, seen].double()
        for shared, own in ((key, own_key), (value, own_value))
    )
    products = 0.7 * query.double() @ keys.transpose(-1, -2)
    if terms.softcap is not None:
        products = terms.softcap * torch.tanh(products / terms.softcap)
    weights = products.exp()
    total = weights.sum(-1) + (0.0 if terms.sinks is None else terms.sinks.double().exp().view(2, 2))
    torch.testing.assert_close(attention.double(), weights @ values / total[..., None], rtol=0.0, atol=1e-6)


# --- What holds to the bit -----------------------------------------------------------------------------------------


@NAMES
@pytest.mark.by_default("h2o")
def test_a_policy_beside_them_leaves_other_actions_as_they_are(name: str) -> None:
    others = [HALF_SNAPKV, HALF_RECENT, CONTROL]
    company = generate([*others, policy_action(name, 20)], count=3)
    for unit, twin in zip(generate(others, count=3), company, strict=False):
        assert unit.events.equals(twin.events)


# --- What a study names, and what is recorded ----------------------------------------------------------------------


@NAMES
def test_bytes_are_those_of_the_most_entries(name: str) -> None:
    """Bytes equal those of a selector that keeps as many entries; n + H - 1 if m is never reached."""
    actions = [policy_action(name, keep) for keep in ("1/2", LENGTH + HORIZON - 2, LENGTH + HORIZON - 1, 10_000)]
    half, most, just, all_of_it, recent, control = (
        unit.record for unit in generate([*actions, HALF_RECENT, CONTROL], count=1)
    )
    for column in ("kept_entries", "payload_bytes", "index_bytes", "metadata_bytes", "resident_bytes"):
        assert half[column] == recent[column], column
    assert all_of_it["kept_entries"] == most["kept_entries"] == LENGTH
    for column in ("payload_bytes", "index_bytes"):
        assert most[column] * half["kept_entries"] == half[column] * (LENGTH + HORIZON - 2)
    assert all_of_it["payload_bytes"] * LENGTH == control["payload_bytes"] * (LENGTH + HORIZON - 1)
    assert just["index_bytes"] == all_of_it["index_bytes"] == control["index_bytes"] == 0


@NAMES
def test_identity_and_row(name: str) -> None:
    action, other = policy_action(name, "1/2"), policy_action(name, 20)
    model = random_model("llama")
    known = model.identity(action).selector_sha256
    assert known == model.identity(replace(other, name="another")).selector_sha256, "m is not part of it"
    assert known not in {model.identity(CONTROL).selector_sha256, model.identity(HALF_SNAPKV).selector_sha256}
    assert len({model.identity(policy_action(one, 20)).selector_sha256 for one in POLICIES}) == len(POLICIES)
    row = action.row("s", prespecified=True)
    assert (row["selector"], row["keep"], row["policy"]) == ("full", "1/2", name)
    assert HALF_SNAPKV.row("s", prespecified=True)["policy"] is None


def test_a_budget_must_hold_the_sinks() -> None:
    line = refused(generate, [policy_action("sliding", 4)])
    assert "keep = 4 " in line
    assert line.endswith("policy sliding needs at least 5")
