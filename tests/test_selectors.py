"""Retention, selectors and eviction: exact counts, sorted sets, promises kept, and sets that a brute force chooses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from plain_generator import keep_recent, keep_snapkv, share_of
from torch import Tensor

from generator.actions import Action, build_action
from generator.attention import PromptLayer
from generator.eviction import CompactCache, evict, kept_entries
from generator.selectors import SELECTORS, Full, Recent, Selector, SnapKV
from schema.errors import InputError, OperationError
from schema.retention import Retention
from schema.study import ActionSection

KV_HEADS, GROUP, SIZE = 2, 3, 8


def prompt_of(entries: int, layers: int = 2, window: int = 64, seed: int = 0) -> list[PromptLayer]:
    """Random prompt layers, as the recording attention leaves them."""
    generator = torch.Generator().manual_seed(seed)
    shape, queries = (KV_HEADS, entries, SIZE), (KV_HEADS * GROUP, min(window, entries), SIZE)
    return [
        PromptLayer(*(torch.randn(s, generator=generator) for s in (shape, shape, queries)), scaling=SIZE**-0.5)
        for _ in range(layers)
    ]


# --- Retention: the exact integer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["1/2", "9/10", "1/10", "2/3", "7/9", "90%", "12.5%", "1/1000"])
def test_a_share_keeps_its_floor(share: str) -> None:
    fraction = Fraction(share[:-1]) / 100 if share.endswith("%") else Fraction(share)
    retention = Retention.parse(share)
    for entries in [*range(1, 120), 999, 1000, 1001, 4095, 10**6 + 7, 10**12 + 1]:
        kept = retention.kept(entries)
        assert kept <= entries * fraction < kept + 1
        if entries < 120:
            assert kept == share_of(entries, fraction)


def test_a_share_is_not_one_minus_its_complement() -> None:
    """int(n * (1 - r)) in floating point keeps 99 of 1000 at r = .9, and errs for many other n."""
    assert int(1000 * (1 - 0.9)) == 99
    assert Retention.parse("1/10").kept(1000) == 100
    assert Retention.parse("90%").kept(10) == 9
    assert Retention.parse("7/10").kept(10) == 7
    wrong = [n for n in range(1, 2000) if int(n * (1 - 0.9)) != Retention.parse("1/10").kept(n)]
    assert wrong, "where the two differ, ours is the exact one"
    assert all(Retention.parse("1/10").kept(n) == n // 10 for n in wrong)


@pytest.mark.parametrize(
    ("text", "entries", "kept"), [(512, 512, 512), (512, 511, 511), ("512", 4096, 512), ("all", 9, 9)]
)
def test_counts_and_all(text: int | str, entries: int, kept: int) -> None:
    assert Retention.parse(text).kept(entries) == kept


@pytest.mark.parametrize("text", [1, 512, "1/2", "90%", "7/9", "all", "1/1", "100%"])
def test_a_retention_reads_back_from_its_text(text: int | str) -> None:
    """The ``actions`` table holds the text: the whole fraction must not come back as one entry."""
    retention = Retention.parse(text)
    assert Retention.parse(str(retention)) == retention


@pytest.mark.parametrize(
    "text", [0.5, 1.0, "0.5", 0, -3, "0", "-1/2", "3/2", "101%", "0%", "1/0", "half", "", "%", "1/", "nan%"]
)
def test_a_wrong_retention_is_the_users_mistake(text: float | str) -> None:
    with pytest.raises(InputError) as caught:
        Retention.parse(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- m against window and sinks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "least"),
    [(SnapKV(), 64), (SnapKV(window=16), 16), (Recent(), 4), (Recent(sinks=0), 1), (Recent(sinks=9), 9)],
)
def test_m_must_hold_window_and_sinks(selector: Selector, least: int) -> None:
    assert kept_entries(selector, Retention(least), 1000, "here") == least
    with pytest.raises(InputError) as caught:
        kept_entries(selector, Retention(least - 1) if least > 1 else Retention(Fraction(1, 2000)), 1000, "action 'a'")
    message = str(caught.value)
    assert message.startswith("action 'a': keep = ")
    for number in (least - 1, least, 1000, selector.window, selector.sinks):
        assert str(number) in message
    # A prompt that is kept whole has no such bound.
    assert kept_entries(selector, Retention(10), 10, "here") == 10
    assert kept_entries(selector, Retention(10), 3, "here") == 3


# --- Every registered selector ---------------------------------------------------------------------------------------

LENGTHS = [(100, 64), (100, 65), (100, 99), (100, 100), (131, 70), (700, 350), (1001, 900)]
EVERY = pytest.mark.parametrize("name", sorted(SELECTORS))


def evicted(name: str, entries: int, kept: int, seed: int = 0) -> tuple[list[PromptLayer], CompactCache]:
    prompt = prompt_of(entries, seed=seed)
    return prompt, evict(prompt, SELECTORS[name](), kept)


def lengths_of(name: str) -> list[tuple[int, int]]:
    """Prompt and kept lengths; ``full`` keeps everything or nothing can be said of it."""
    return [(entries, entries if name == "full" else kept) for entries, kept in LENGTHS]


@EVERY
def test_kept_sets_are_sound(name: str) -> None:
    """Exactly m per head and layer, sorted, in range, window and sinks inside; keys and values those of the set."""
    selector = SELECTORS[name]()
    for entries, kept in lengths_of(name):
        prompt, cache = evicted(name, entries, kept)
        assert cache.kept_entries == kept
        assert cache.extents.tolist() == [[entries, kept]] * len(prompt)
        for layer, left, index in zip(prompt, cache.layers, cache.indices, strict=True):
            assert index.shape == (KV_HEADS, kept)
            assert left.key.shape == left.value.shape == (KV_HEADS, kept, SIZE)
            for head in range(KV_HEADS):
                chosen = index[head].tolist()
                assert chosen == sorted(set(chosen))
                assert set(chosen) <= set(range(entries))
                assert set(range(entries - selector.window, entries)) <= set(chosen)
                assert set(range(selector.sinks)) <= set(chosen)
                assert torch.equal(left.key[head], layer.key[head, chosen])
                assert torch.equal(left.value[head], layer.value[head, chosen])


@EVERY
def test_choices_repeat_and_hashes_are_those_of_the_sets(name: str) -> None:
    for entries, kept in lengths_of(name):
        cache, again = (evicted(name, entries, kept)[1] for _ in range(2))
        assert cache.kept_sha256 == again.kept_sha256
        for index, digest in zip(cache.indices, cache.kept_sha256, strict=True):
            assert digest == hashlib.sha256(np.array(index.tolist(), dtype="<i4").tobytes()).hexdigest()
    hashes = {evicted(name, *lengths)[1].kept_sha256 for lengths in lengths_of(name)}
    assert len(hashes) == len(set(lengths_of(name))), "other sets, other hashes"


@EVERY
def test_a_whole_prompt_is_kept_whole(name: str) -> None:
    """m >= n: everything in order, bitwise, whatever the scores and however short the prompt."""
    for entries in (1, 3, 63, 64, 100):
        prompt, cache = evicted(name, entries, entries)
        for layer, left, index in zip(prompt, cache.layers, cache.indices, strict=True):
            assert index.tolist() == [list(range(entries))] * KV_HEADS
            assert torch.equal(layer.key, left.key)
            assert torch.equal(layer.value, left.value)


@EVERY
def test_bytes_depend_on_the_retention_alone(name: str) -> None:
    for entries, kept in lengths_of(name):
        cache, recent = evicted(name, entries, kept)[1], evicted("recent", entries, kept)[1]
        for measure in ("payload_bytes", "index_bytes", "metadata_bytes"):
            assert getattr(cache, measure) == getattr(recent, measure)
        assert cache.payload_bytes == 2 * 2 * KV_HEADS * kept * SIZE * 4
        assert (
            all(
                part.untyped_storage().nbytes() == part.nbytes
                for layer in cache.layers
                for part in (layer.key, layer.value)
            )
            or kept == entries
        ), "no view keeps the whole prompt alive"


@EVERY
def test_identity_and_parameters(name: str) -> None:
    """What the ``actions`` table records is there, and an action can be built from a study's section."""
    selector = SELECTORS[name]()
    assert set(selector.identity()) == {"kernel", "pooling", "head_reduction"}
    assert SELECTORS[name].summary
    assert selector.window >= 0
    assert selector.sinks >= 0
    keep = "all" if name == "full" else "1/2"
    action = build_action(ActionSection(name="some", selector=name, keep=keep))
    assert action.selector == selector
    row = action.row("study", prespecified=True)
    assert row["selector"] == name
    assert row["keep"] == keep
    assert (row["window"], row["sinks"]) == (selector.window, selector.sinks)


# --- Each selector against a brute force ------------------------------------------------------------------------------


def eager_attention(layer: PromptLayer, window: int) -> np.ndarray:
    """Softmax attention [heads, n, n] of which only the last ``window`` rows are meaningful, one row at a time."""
    heads, entries = layer.window_query.shape[0], layer.key.shape[1]
    attention = np.zeros((heads, entries, entries))
    queries = layer.window_query.double().numpy()[:, -window:]
    for head in range(heads):
        keys = layer.key[head // GROUP].double().numpy()
        for row in range(window):
            last = entries - window + row
            weights = np.exp(keys[: last + 1] @ queries[head, row] * layer.scaling)
            attention[head, last, : last + 1] = weights / weights.sum()
    return attention


@pytest.mark.parametrize(("window", "kernel"), [(64, 5), (16, 7), (1, 1), (64, 1), (80, 129)])
@pytest.mark.parametrize(("entries", "kept"), [(100, 99), (180, 90), (180, 80)])
def test_snapkv_keeps_what_the_definition_keeps(entries: int, kept: int, window: int, kernel: int) -> None:
    """Float32 scores against float64 ones: a set could differ only where two scores agree to 7 digits."""
    prompt = prompt_of(entries, window=80)
    cache = evict(prompt, SnapKV(window=window, kernel=kernel), kept)
    for layer, index in zip(prompt, cache.indices, strict=True):
        wanted = keep_snapkv(kept, window, kernel)(eager_attention(layer, window), KV_HEADS)
        assert index.tolist() == wanted.tolist()


@pytest.mark.parametrize("sinks", [0, 1, 4, 50])
@pytest.mark.parametrize(("entries", "kept"), [(51, 50), (180, 90), (1000, 512)])
def test_recent_keeps_sinks_and_the_latest(entries: int, kept: int, sinks: int) -> None:
    cache = evict(prompt_of(entries), Recent(sinks=sinks), kept)
    wanted = keep_recent(kept, sinks)(np.zeros((1, entries, entries)), KV_HEADS)
    for index in cache.indices:
        assert index.tolist() == wanted.tolist()


def test_snapkv_prefers_earlier_positions_on_ties() -> None:
    """Equal keys give equal attention; zero padding lowers the pooled scores of both ends before the window."""
    layer = prompt_of(20, layers=1, window=4)[0]
    flat = PromptLayer(torch.ones_like(layer.key), layer.value, layer.window_query, layer.scaling)
    index = evict([flat], SnapKV(window=4, kernel=5), 9).indices[0]
    assert index.tolist() == [[2, 3, 4, 5, 6, 16, 17, 18, 19]] * KV_HEADS


def test_snapkv_sees_its_own_window_only() -> None:
    """A recording with more queries than the window, because another action asked for them, changes nothing."""
    long = prompt_of(200, window=128)
    short = [PromptLayer(p.key, p.value, p.window_query[:, -32:], p.scaling) for p in long]
    one, other = (evict(prompt, SnapKV(window=32), 90) for prompt in (long, short))
    assert one.kept_sha256 == other.kept_sha256


# --- Broken promises and wrong parameters ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """Keeps sinks and the latest positions, then spoils the set in one way."""

    summary: ClassVar[str] = "broken"
    fault: str
    window: int = 8
    sinks: int = 2

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """A sound set, spoilt."""
        index = Recent(self.sinks).keep(layer, kept).clone()
        if self.fault == "unsorted":
            index[1, [3, 4]] = index[1, [4, 3]]
        elif self.fault == "twice":
            index[0, 3] = index[0, 4]
        elif self.fault == "fewer":
            return index[:, :-1]
        elif self.fault == "more":
            return torch.cat([index[:, :2], torch.full((len(index), 1), 2), index[:, 2:]], dim=1)
        elif self.fault == "one head":
            return index[:1]
        elif self.fault == "negative":
            index[:, 0] = -1
        elif self.fault == "beyond":
            index[:, -1] = layer.key.shape[1]
        elif self.fault == "window":
            index[1, -8:] -= 1
        elif self.fault == "sinks":
            index[1, 1] = 5
        return index

    def identity(self) -> dict[str, str | int | None]:
        """None."""
        return {}


FAULTS = ["unsorted", "twice", "fewer", "more", "one head", "negative", "beyond", "window", "sinks"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_promise_is_an_operation_error(fault: str) -> None:
    evict(prompt_of(60), Broken("none"), 30)
    with pytest.raises(OperationError, match=r"Broken broke its promise in layer 0: .*exactly 30") as caught:
        evict(prompt_of(60), Broken(fault), 30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"selector": "snapvk", "keep": 512}, "unknown selector 'snapvk'; did you mean 'snapkv'?"),
        (
            {"selector": "recent", "keep": 512, "window": 8},
            "selector 'recent' has no parameter 'window'; it takes sinks",
        ),
        ({"selector": "full", "keep": "all", "sinks": 8}, "no parameter 'sinks'; it takes none"),
        ({"selector": "full", "keep": "1/2"}, 'keeps every entry; write keep = "all"'),
        ({"selector": "snapkv", "keep": 512, "kernel": 4}, "kernel = 4: .*odd"),
    ],
)
def test_a_wrong_action_is_the_users_mistake(parameters: dict[str, int | str], says: str) -> None:
    with pytest.raises(InputError, match=f"^action 'mine': .*{says.replace('?', '[?]')}"):
        build_action(ActionSection(name="mine", **parameters))


def test_parameters_reach_the_selector() -> None:
    action = build_action(ActionSection(name="mine", selector="snapkv", keep="1/2", window=32, kernel=7))
    assert action == Action("mine", "snapkv", SnapKV(window=32, kernel=7), Retention(Fraction(1, 2)))
    assert build_action(ActionSection(name="all", selector="full", keep="all")).selector == Full()
    assert not action.control
