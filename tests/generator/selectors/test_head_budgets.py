"""Head budgets: heads share a layer's entries by their scores, by plain loops and by transformers under a mask."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fixtures.common_actions import CONTROL, HALF_SNAPKV, SHARED_SNAPKV
from fixtures.families import saved_family
from fixtures.refusals import refused
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvdrift.generator.actions import build_action
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import VOCABULARY, random_document, random_model
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.coupling.streams import SHARE_ALL
from kvdrift.generator.identity import selector_sha256
from kvdrift.generator.selectors import SELECTORS, ScoringSelector, Selector, build_selector
from kvdrift.generator.selectors.policies.sliding import Sliding
from kvdrift.generator.selectors.selector import ADAKV
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import ActionSection


@dataclass(frozen=True)
class FirstChannel(ScoringSelector):
    """Scores are the keys' first channel."""

    summary: ClassVar[str] = "first channel"
    sinks: int = 0
    window: int = 0

    def score(self, layer: PromptLayer) -> Tensor:
        return layer.key[..., 0].t().contiguous().t()  # in memory position by position


def scored(scores: Tensor) -> PromptLayer:
    """A layer of these scores, [KV heads, n]; all other numbers differ."""
    heads, entries = scores.shape
    key = torch.arange(heads * entries * 8).float().view(heads, entries, 8)
    value = -key.clone()
    key[..., 0] = scores
    return PromptLayer(key, value, torch.ones(heads, max(entries, 1), 8), scaling=1.0)


def plain_choice(scores: Sequence[Sequence[float]], kept: int, sinks: int, window: int) -> list[list[int]]:
    """Every head takes what it always keeps and its best; then all other positions of all heads stand in one line."""
    entries = len(scores[0])
    chosen: list[set[int]] = []
    line = []
    for head, its in enumerate(scores):
        own = {position for position in range(entries) if position < sinks or position >= entries - window}
        others = sorted((-its[position], position) for position in range(entries) if position not in own)
        while len(own) < kept // 5:
            own.add(others.pop(0)[1])
        chosen.append(own)
        line += [(score, head, position) for score, position in others]
    line.sort()
    for _, head, position in line[: len(scores) * kept - sum(map(len, chosen))]:
        chosen[head].add(position)
    return [sorted(own) for own in chosen]


def kept_positions(index: Tensor, entries: int) -> list[list[int]]:
    return [[position for position in row if position < entries] for row in index.tolist()]


@pytest.mark.parametrize("ties", [0, 1])
def test_heads_share_entries_as_plain_loops_share_them(ties: int) -> None:
    """Ties go to the lower head, then to the earlier position; a head may keep no entry of a small budget."""
    random = np.random.default_rng(ties)
    fewest: list[int] = []
    for case in range(150):
        heads, entries = int(random.integers(1, 5)), int(random.integers(12, 60))
        sinks, window = (int(random.integers(0, 3)), int(random.integers(0, 5))) if case % 3 else (0, 0)
        kept = int(random.integers(max(sinks + window, 1), entries if case % 3 else 5))
        shape = heads, entries
        drawn = random.integers(0, 4, shape).astype(float) if ties else random.normal(size=shape)
        scores = drawn * np.arange(1, heads + 1)[:, None]
        layer = scored(torch.from_numpy(scores).float())
        selector = FirstChannel(sinks, window, budget=ADAKV)
        cache = evict([layer], selector, kept)
        wanted = plain_choice(layer.key[..., 0].tolist(), kept, sinks, window)
        assert kept_positions(cache.indices[0], entries) == wanted
        counts = [len(positions) for positions in wanted]
        fewest.append(min(counts))
        assert cache.indices[0].shape[1] == max(counts)
        assert cache.layers[0].lengths == (None if set(counts) == {kept} else tuple(counts))
        even = evict([layer], replace(selector, budget="even"), kept)
        for name in ("kept_entries", "payload_bytes", "index_bytes", "metadata_bytes", "stored_bytes"):
            assert getattr(cache, name) == getattr(even, name), name
        assert cache.kept_entries == kept
        by_position = cache.kept_by_position(entries)
        assert by_position.counts.tolist() == [
            [sum(position in positions for positions in wanted) for position in range(entries)]
        ]
        for head, positions in enumerate(wanted):
            for part, whole in ((cache.layers[0].key, layer.key), (cache.layers[0].value, layer.value)):
                assert torch.equal(part[head, : len(positions)], whole[head, positions])
    assert min(fewest) == 0


def test_other_sets_have_another_hash() -> None:
    """Also if one is the other with its positions at other heads."""
    scores = torch.tensor([[9.0, 8, 7, 6, 1, 1], [5.0, 2, 2, 2, 2, 2]])
    hashes = {
        evict([scored(rows)], FirstChannel(budget=budget), 3).kept_sha256
        for rows in (scores, scores.flip(0), scores.flip(1)) for budget in ("even", ADAKV)
    }  # fmt: skip
    assert len(hashes) == 5, "even sets do not change with the order of heads where both heads keep the first positions"


def test_budgets_of_layers_are_shared_by_their_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 120, 8), (2, 120, 8), (4, 120, 8)
    layers = [PromptLayer(*(torch.randn(s, generator=generator) for s in shapes), scaling=0.35) for _ in range(3)]
    selector = build_selector("pyramidkv", {"budget": ADAKV, "window": 8, "beta": 4})
    cache = evict(layers, selector, 40)
    sums = [sum(map(len, kept_positions(index, 120))) for index in cache.indices]
    assert sums == [2 * budget for budget in selector.budgets(40, 120, 3)]
    assert sums[0] > sums[1] > sums[2]
    assert cache.kept_entries == 40


# --- Distributions ----------------------------------------------------------------------------------------------------

STEPS, STREAMS = 6, 3


@functools.cache
def eager_network_of(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def masked_distributions(folder: str, tokens: Sequence[int], more: Tensor, kept: Sequence[Any]) -> Tensor:
    """Next-token distributions after each of the tokens ``more`` [T], by one pass of transformers, [T, V].

    ``kept`` has for each layer the kept positions of each KV head, or None; the queries of ``more`` see no other
    position of the prompt.
    """
    network = eager_network_of(folder)
    entries, heads = len(tokens), network.config.num_attention_heads

    def hiding(sets: Sequence[Sequence[int]]) -> Any:
        hidden = torch.zeros(len(sets), entries + len(more), entries + len(more))
        hidden[:, entries:, :entries] = -torch.inf
        for head, positions in enumerate(sets):
            hidden[head, entries:, positions] = 0.0
        hidden = hidden.repeat_interleave(heads // len(sets), 0)[None]

        def hide(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return given, named | {"attention_mask": named["attention_mask"] + hidden}

        return hide

    with ExitStack() as hooks:
        for layer, sets in zip(network.model.layers, kept, strict=True):
            if sets is not None:
                hook = layer.self_attn.register_forward_pre_hook(hiding(sets), with_kwargs=True)
                hooks.callback(hook.remove)
        with torch.no_grad():
            logits = network(torch.tensor([[*tokens, *more.tolist()]]), use_cache=False).logits[0, entries:]
    return logits.double().softmax(-1)


@pytest.mark.parametrize(
    ("family", "entries", "fused"),
    [
        ("llama-3", 200, False), ("llama-3", 620, False), ("llama-3", 620, True), ("qwen3-moe", 200, True),
        ("gemma2", 300, False), ("gpt-oss", 300, False), ("gpt-oss", 620, False),
    ],
)  # fmt: skip
@pytest.mark.by_default("llama-3-200-False", "llama-3-620-True", "gemma2-300-False", "gpt-oss-300-False")
def test_distributions_are_those_of_transformers_under_a_mask(family: str, entries: int, fused: bool) -> None:  # noqa: FBT001
    """Products by oneDNN from 256 entries on, fused kernels of torch below; layers with windows keep their entries.

    A stream has the same bits alone, where no expert is asked.
    """
    folder = str(saved_family(family))
    model, document = load_model(folder), random_document(f"masked-{entries}", entries)
    prepared = model.prepare(document, [SHARED_SNAPKV, replace(HALF_SNAPKV, name="even"), CONTROL], STEPS + 1)
    compact = prepared._caches[0].compact
    assert any(layer.lengths for layer in compact.layers)
    sets = iter([kept_positions(index, entries) for index in compact.indices])
    windows = [layer.terms.window is not None for layer in prepared._prompt.layers]
    kept = [None if windowed else next(sets) for windowed in windows]
    more = torch.randint(VOCABULARY, (STREAMS, STEPS), generator=torch.Generator().manual_seed(1))
    kernels = prepared.kernels(STREAMS + 3, replace(SHARE_ALL, fused=fused))
    kernels.open([0] + [1] * STREAMS + [2, 3])
    found = []
    for step in range(STEPS):
        tokens = torch.cat([more[:1, step], more[:, step], more[:2, step]])
        found.append(kernels.advance(tokens).clone())
    rows = torch.stack(found, 1)  # [streams, T, V]
    for stream in range(STREAMS):
        wanted = masked_distributions(folder, document.tokens, more[stream], kept)
        assert (rows[1 + stream].double() - wanted).abs().max() < 1e-5
    whole = masked_distributions(folder, document.tokens, more[0], [None] * len(kept))
    assert (rows[0].double() - whole).abs().max() < 1e-5
    assert (rows[1].double() - whole).abs().max() > 1e-3, "eviction is seen"
    for stream, cache in ((0, 0), (1, 1)) if family in ("llama-3", "gemma2") else ():
        kernels.open([cache])
        alone = [kernels.advance(more[:1, step]).clone()[0] for step in range(STEPS)]
        assert torch.equal(rows[stream], torch.stack(alone))


# --- Codecs, identities, refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CODECS if name != "nvfp4" and not name.startswith("hqq")])
def test_a_codec_stores_one_head_after_the_other(name: str) -> None:
    """The numbers are those of a layer of one head, and bytes are summed over heads."""
    generator = torch.Generator().manual_seed(0)
    layer = PromptLayer(*(torch.randn(2, 300, 32, generator=generator) for _ in range(3)), scaling=0.2)
    layer.key[1] *= 3
    codec: Any = build_action(ActionSection(name="a", selector="knorm", keep="1/2", codec=name)).holding
    selector = build_selector("knorm", {"budget": ADAKV})
    cache, plain = evict([layer], selector, 150, [codec]), evict([layer], selector, 150)
    lengths = plain.layers[0].lengths
    assert lengths is not None
    assert cache.kept_sha256 == plain.kept_sha256
    stored = []
    for head, count in enumerate(lengths):
        own = replace(
            plain.layers[0], key=plain.layers[0].key[head : head + 1, :count],
            value=plain.layers[0].value[head : head + 1, :count], lengths=None,
        )  # fmt: skip
        held = codec.hold(own)
        assert torch.equal(cache.layers[0].key[head, :count], held.key[0])
        assert torch.equal(cache.layers[0].value[head, :count], held.value[0])
        stored.append(codec.layer_bytes(own))
    assert cache.payload_bytes == sum(size.payload for size in stored)
    assert cache.scale_bytes == sum(size.scales for size in stored)


def test_bytes_of_codecs_are_compared_where_the_heads_keep_equal_numbers() -> None:
    """A run compares the bytes of actions that give equal values."""
    even, shared, coded, shared_coded = (
        build_action(ActionSection(name=str(number), selector="snapkv", keep="1/2", **section)).decides_bytes(400, 3)
        for number, section in enumerate(
            ({}, {"budget": ADAKV}, {"codec": "int4"}, {"codec": "int4", "budget": ADAKV})
        )
    )  # fmt: skip
    assert even == shared
    assert len({even, coded, shared_coded}) == 3


def test_the_identity_has_a_budget_only_if_it_is_not_even() -> None:
    even, shared = (build_selector("snapkv", parameters) for parameters in ({}, {"budget": ADAKV}))
    assert even == build_selector("snapkv", {"budget": "even"})
    assert even.identity()["parameters"] == {}
    assert shared.identity()["parameters"] == {"budget": "adakv"}
    assert selector_sha256(even) != selector_sha256(shared)


@dataclass(frozen=True)
class SharedCut(Sliding):
    """A window whose prompt is cut with head budgets."""

    @property
    def first_cut(self) -> Selector:
        return FirstChannel(budget=ADAKV)


def test_a_policy_cannot_begin_with_heads_that_share_a_budget() -> None:
    section = ActionSection(name="a", policy="sliding", keep=100)
    action = replace(build_action(section), policy=SharedCut())
    says = "action 'a': the first_cut of policy 'sliding' lets heads keep different numbers of entries; it must keep"
    prepare = random_model("llama").prepare
    assert refused(prepare, random_document("d200", 200), [action], 4).startswith(says)


@dataclass(frozen=True)
class Wrong(FirstChannel):
    """Changes what would be right, [KV heads, most]."""

    change: Any = None

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        return self.change(FirstChannel(self.sinks, self.window, budget=ADAKV).keep(layer, kept).clone())


def put(row: int, column: int, value: int) -> Any:
    def change(index: Tensor) -> Tensor:
        index[row, column] = value
        return index

    return change


def test_a_wrong_choice_is_an_operation_error() -> None:
    """Head 0 keeps 9 of 20 positions, and head 1 keeps 3, those of its sink and its window."""
    scores = torch.stack([torch.arange(20.0), -torch.arange(20.0) - 1])
    right = FirstChannel(1, 2, budget=ADAKV).keep(scored(scores), 6)
    assert right.tolist() == [[0, *range(12, 20)][:9], [0, 18, 19, *[20] * 6]]
    evict([scored(scores)], Wrong(1, 2, budget=ADAKV, change=Tensor.clone), 6)
    for change in (
        put(0, 1, 20), put(0, 0, 1), put(1, 3, 5), put(1, 1, 17), put(1, 3, 21), put(0, 2, 12),
        lambda index: torch.nn.functional.pad(index, (0, 1), value=20), lambda index: index[0],
    ):  # fmt: skip
        line = refused(evict, [scored(scores)], Wrong(1, 2, budget=ADAKV, change=change), 6, error=OperationError)
        assert line.startswith(
            "selector Wrong: wrong positions in layer 0; it must return 6 on average and at least 3 ascending positions"
        )


def test_every_scoring_selector_takes_head_budgets() -> None:
    taking = [name for name, kind in SELECTORS.items() if issubclass(kind, ScoringSelector)]
    assert taking == ["snapkv", "pyramidkv", "h2o", "tova", "knorm", "keydiff", "expected_attention", "random"]
    model = random_model("llama")
    for name in taking:
        action = build_action(ActionSection(name=name, selector=name, keep="1/2", budget="adakv"))
        record = model.prepare(random_document("d200", 200), [action], 4).record(1, 1)
        assert record["kept_entries"] == 100
