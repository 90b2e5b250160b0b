"""Units of events from real attention: compared with the plain twin, bitwise properties, and rules of every trajectory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from fixtures.common_actions import CONTROL, HALF_RECENT, HALF_SNAPKV, Steps, assert_like_plain, plain_twin, steps_of
from oracles.plain_generator import Chooser, PlainSteps, keep_all, keep_recent, keep_snapkv, load_eager

from kvdrift.generator.actions import Action
from kvdrift.generator.checks.random_models import (
    ARCHITECTURES,
    EOS_TOKENS,
    random_document,
    random_model,
    save_random_model,
)
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SnapKV
from kvdrift.generator.transformer.loading import load_model
from kvdrift.log.units.unit import Unit, conform_unit
from kvdrift.schema.retention import Retention

SEED = 3
HORIZON = 28

FEW_SNAPKV = Action("snapkv-80", "snapkv", SnapKV(window=32, kernel=7), Retention(80))
ACTIONS = (HALF_SNAPKV, HALF_RECENT, FEW_SNAPKV, CONTROL)


def pending(actions: Sequence[Action] = ACTIONS, first: int = 0, count: int = 16) -> list[PendingUnit]:
    """Units of ``count`` replicates, the control with its own two."""
    return [PendingUnit(a, 0, 2) if a.control else PendingUnit(a, first, count) for a in actions]


def generate(
    kind: str, length: int, units: Sequence[PendingUnit], dtype: str = "float32", seed: int = SEED
) -> list[Unit]:
    """Units of the random document of that length under the random model of that kind."""
    return generate_units(random_model(kind, dtype), "s", random_document(f"d{length}", length), units, HORIZON, seed)


@cache
def events(kind: str, length: int, dtype: str = "float32") -> dict[tuple[str, int], Steps]:
    """All actions generated together: each pair's steps by (action, replicate)."""
    return by_pair(generate(kind, length, pending(), dtype))


def by_pair(units: Sequence[Unit]) -> dict[tuple[str, int], Steps]:
    pairs = {}
    for unit in units:
        steps = steps_of(unit)
        for row in range(unit.record["replicates"]):
            key = unit.record["action"], unit.record["first_replicate"] + row
            pairs[key] = {name: column[row] for name, column in steps.items()}
    return pairs


# --- Against the plain twin ----------------------------------------------------------------------------------------


def plain_choosers(length: int) -> dict[str, Chooser]:
    return {
        "snapkv-half": keep_snapkv(length // 2), "recent-half": keep_recent(length // 2),
        "snapkv-80": keep_snapkv(80, window=32, kernel=7), "full": keep_all(),
    }  # fmt: skip


@cache
def plain_steps(kind: str, length: int, layers: int, replicates: int) -> dict[str, PlainSteps]:
    with TemporaryDirectory() as folder:
        network = load_eager(save_random_model(Path(folder), kind, layers=layers))
    document = random_document(f"d{length}", length)
    return {
        action: plain_twin(network, document, action, chooser, replicates, HORIZON)
        for action, chooser in plain_choosers(length).items()
    }


@pytest.mark.parametrize(
    ("kind", "length", "layers"),
    [
        ("llama", 300, 3), ("qwen2", 151, 3), ("qwen3", 197, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 197, 2), ("qwen2", 260, 2))),
    ],
)  # fmt: skip
@pytest.mark.by_default("qwen3-197-2")
def test_fast_equals_plain(kind: str, length: int, layers: int) -> None:
    """Shared prompts, shared streams and merged softmaxes move logits by some 1e-6, so delta and f by less than 1e-5.

    Tokens are equal unless a uniform falls within some 1e-6 of a boundary: at most about 2% of seeds have one among
    these 28,000 draws, and the seed is fixed.
    """
    count = 7
    plain = plain_steps(kind, length, layers, count)
    document = random_document(f"d{length}", length)
    units = [PendingUnit(action, 0, count) for action in ACTIONS]
    ended = diverged = 0
    for unit in generate_units(random_model(kind, layers=layers), "s", document, units, HORIZON, SEED):
        fast, slow = steps_of(unit), plain[unit.record["action"]]
        assert_like_plain(unit, slow)
        hashes = [hashlib.sha256(kept.astype("<i4").tobytes()).hexdigest() for kept in slow.kept]
        assert unit.record["kept_sha256"] == hashes
        assert unit.record["kept_entries"] == slow.kept[0].shape[1]
        ended += (fast["x_eos"][:, -1] != fast["y_eos"][:, -1]).sum()
        diverged += (fast["x_token"] != fast["y_token"]).any(1).sum()
    assert diverged >= count, "most evicted pairs diverge"
    assert ended > 0, "some pairs end on one side only"


def test_a_large_vocabulary_equals_plain(tmp_path: Path) -> None:
    """Distributions are float32 there, and are drawn from in blocks: within 1e-5 as above, of 5,000 tokens."""
    folder = save_random_model(tmp_path / "model", "llama", vocab_size=5000)
    document, count = random_document("d150", 150), 4
    plain = plain_twin(load_eager(folder), document, "snapkv-half", keep_snapkv(75), count, 10)
    units = generate_units(load_model(str(folder)), "s", document, [PendingUnit(HALF_SNAPKV, 0, count)], 10, SEED)
    assert_like_plain(units[0], plain)
    assert (plain.x_token != plain.y_token).any()


# --- Events depend on (seed, document, action, replicate) and on nothing else ---------------------------------------

KINDS = pytest.mark.parametrize(
    ("kind", "length", "dtype"), [*((kind, 197, "float32") for kind in ARCHITECTURES), ("qwen2", 150, "bfloat16")]
)


def test_events_depend_on_the_whole_key() -> None:
    """Another seed, document or action name gives other continuations; the reference's own X ignores the action."""
    whole = events("llama", 197)
    renamed = Action("renamed", "snapkv", HALF_SNAPKV.selector, HALF_SNAPKV.retention)
    for units, seed in ((pending((HALF_SNAPKV,)), SEED + 1), (pending((renamed,)), SEED)):
        other = by_pair(generate("llama", 197, units, seed=seed))
        differs = {
            name: [(whole["snapkv-half", k][name] != steps[name]).any() for (_, k), steps in other.items()]
            for name in ("x_token", "y_token")
        }
        assert any(differs["y_token"])
        assert any(differs["x_token"]) == (seed != SEED)
    for replicate in range(16):
        assert np.array_equal(whole["snapkv-half", replicate]["x_token"], whole["recent-half", replicate]["x_token"])


@KINDS
def test_the_control_is_exactly_zero(kind: str, length: int, dtype: str) -> None:
    """Two control replicates beside sixteen of the others: delta = f = 0 and no mismatch, to the bit."""
    for replicate in range(2):
        steps = events(kind, length, dtype)["full", replicate]
        assert not steps["delta"].any()
        assert not steps["f"].any()
        assert not np.nan_to_num(steps["kl"]).any()
        assert not np.nan_to_num(steps["kl_own"]).any()
        assert np.array_equal(steps["x_token"], steps["y_token"])


# --- What every trajectory obeys -------------------------------------------------------------------------------------


@KINDS
def test_trajectories_obey_the_definitions(kind: str, length: int, dtype: str) -> None:
    for (action, _), steps in events(kind, length, dtype).items():
        x, y, delta, f = (steps[name] for name in ("x_token", "y_token", "delta", "f"))
        mismatch = x != y
        assert delta[0] == f[0] == 0.0, "eviction follows prefill"
        assert not mismatch[0], "tau >= 2"
        assert ((delta >= 0) & (delta <= 1) & (f >= 0) & (f <= 1)).all()
        assert not mismatch[delta == 0].any(), "equal distributions never part"
        tau = int(mismatch.argmax()) if mismatch.any() else HORIZON - 1
        assert np.array_equal(delta[: tau + 1], f[: tau + 1]), "one stream until the pair parts"
        ends = {}
        for side, tokens in (("x", x), ("y", y)):
            eos = np.isin(tokens, EOS_TOKENS)
            ends[side] = int(eos.argmax()) if eos.any() else HORIZON
            assert np.array_equal(steps[f"{side}_eos"], np.arange(HORIZON) >= ends[side])
            assert (tokens[ends[side] + 1 :] == EOS_TOKENS[0]).all(), (
                "an absorbed side goes on with the first EOS token"
            )
        assert not f[ends["x"] + 1 :].any(), "f = 0 after X has ended"
        kl, kl_own = steps["kl"], steps["kl_own"]
        assert np.array_equal(np.isnan(kl), np.arange(HORIZON) > ends["x"]), "both are points after X has ended"
        assert np.array_equal(np.isnan(kl_own), np.isnan(kl))
        assert np.array_equal(kl[: tau + 1], kl_own[: tau + 1], equal_nan=True)
        going = ~np.isnan(kl)
        # Pinsker's inequality; distances and divergences are rounded to float32
        assert (f[going] <= np.sqrt(kl[going] / 2) * (1 + 1e-6) + 1e-7).all()
        assert (delta[going] <= np.sqrt(kl_own[going] / 2) * (1 + 1e-6) + 1e-7).all()
        assert np.isfinite(kl[going]).all(), "full distributions lack no token"
        after_y = going & (np.arange(HORIZON) > ends["y"])
        assert np.isinf(kl_own[after_y]).all(), "an ended side draws one token alone"
        assert not delta[max(ends.values()) + 1 :].any(), "delta = 0 once both have ended"
        assert not mismatch[max(ends.values()) + 1 :].any()
        if action != "full" and not mismatch.any() and min(ends.values()) > 2:
            assert delta.any(), "an evicted cache has other distributions even where no token shows it"


def test_all_that_can_happen_does_happen_here() -> None:
    """The cases above are not vacuous: pairs part, end on either side first, end on every EOS token, and never end."""
    steps = [pair for kind in ARCHITECTURES for pair in events(kind, 197).values()]
    first_end = {tuple(bool(pair[f"{side}_eos"][-1]) for side in "xy") for pair in steps}
    assert first_end == {(True, True), (True, False), (False, True), (False, False)}
    seen = {int(pair["y_token"][pair["y_eos"].argmax()]) for pair in steps if pair["y_eos"].any()}
    assert seen == set(EOS_TOKENS)
    assert any((pair["delta"] > 0.99).any() for pair in steps)


# --- Records ---------------------------------------------------------------------------------------------------------


def test_units_are_complete_and_counted() -> None:
    """The store accepts them; ``coupling/test_rollout.py`` counts the distributions."""
    units = generate("llama", 197, pending())
    for unit in units:
        record, table = conform_unit(unit)
        assert table.num_rows == record["replicates"] * HORIZON
        assert record["prompt_entries"] == 197
        assert record["seed"] == SEED
        assert record["batch_invariant"] is True
        assert record["batch_deviation"] == 0.0
        assert record["prefill_seconds"] > 0
        assert record["decode_seconds"] > 0
        assert 0 < record["kernel_evaluations"] <= 3 * record["replicates"] * (HORIZON - 1)
    assert [unit.record["kept_entries"] for unit in units] == [98, 98, 80, 197]


def test_equal_retention_is_equal_bytes() -> None:
    """SnapKV and recent at one retention: every measured byte count agrees, and none is the control's."""
    snapkv, recent, few, full = (unit.record for unit in generate("qwen2", 197, pending(count=2)))
    names = ("payload_bytes", "index_bytes", "metadata_bytes", "resident_bytes")
    assert [snapkv[name] for name in names] == [recent[name] for name in names]
    # 2 layers x 2 KV heads x (keys and values) x 98 entries x 16 float32, then int32 indices, then two int64 per layer.
    suffix = 2 * 2 * 2 * HORIZON * 16 * 4
    assert snapkv["payload_bytes"] == 2 * 2 * 2 * 98 * 16 * 4
    assert snapkv["index_bytes"] == 2 * 2 * 98 * 4
    assert snapkv["metadata_bytes"] == 2 * 2 * 8
    assert snapkv["resident_bytes"] == sum(snapkv[name] for name in names[:3]) + 2 * suffix
    assert few["payload_bytes"] < snapkv["payload_bytes"] < full["payload_bytes"]
    assert snapkv["kept_sha256"] != recent["kept_sha256"]
    assert full["index_bytes"] == 0, "nothing is removed, so there is nothing to index"
    assert full["resident_bytes"] == full["payload_bytes"] + full["metadata_bytes"] + 2 * suffix


@pytest.mark.parametrize("horizon", [1, 2])
def test_short_horizons(horizon: int) -> None:
    document = random_document("d150", 150)
    whole = by_pair(generate("llama", 150, pending(ACTIONS[:1])))
    unit = generate_units(random_model("llama"), "s", document, pending(ACTIONS[:1]), horizon, SEED)[0]
    conform_unit(unit)
    for (action, replicate), steps in by_pair([unit]).items():
        for name, column in steps.items():
            assert np.array_equal(column, whole[action, replicate][name][:horizon])
