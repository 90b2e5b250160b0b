"""Retention, selectors and eviction: exact counts, sorted sets, promises kept, and sets that a brute force chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fixtures.refusals import refused
from fixtures.small_study import write_study
from fixtures.study_files import load_study
from numpy.typing import NDArray
from oracles.plain_generator import keep_recent, keep_snapkv, load_eager, share_of
from torch import Tensor
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import VOCABULARY, random_document, random_model, save_random_model
from kvdrift.generator.selectors import SELECTORS, Full, Recent, Selector, SnapKV, build_selector, h2o
from kvdrift.generator.selectors.expected_attention import QueryMoments
from kvdrift.generator.selectors.h2o import AccumulatedAttention
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.errors import OperationError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import ACTIONS

KV_HEADS, GROUP, SIZE = 2, 3, 8
CAP = 2.0  # of the scores of a small Gemma 2


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
    assert repr(text) in refused(Retention.parse, text)


# --- m against window and sinks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "least"),
    [
        (build_selector("tova", {}), 1), (build_selector("expected_attention", {}), 4), (build_selector("h2o", {}), 1),
        (SnapKV(), 64), (SnapKV(window=16), 16), (Recent(), 4), (Recent(sinks=0), 1), (Recent(sinks=9), 9),
    ],
)  # fmt: skip
def test_m_must_hold_window_and_sinks(selector: Selector, least: int) -> None:
    def kept(retention: Retention, entries: int) -> int:
        return Action("a", "some", selector, retention).kept_entries(entries, "document 'd'")

    assert kept(Retention(least), 1000) == least
    message = refused(kept, Retention(least - 1) if least > 1 else Retention(Fraction(1, 2000)), 1000)
    assert message.startswith("action 'a', document 'd': keep = ")
    for number in (least - 1, least, 1000, selector.window, selector.sinks):
        assert str(number) in message
    # A prompt that is kept whole has no such bound.
    assert kept(Retention(10), 10) == 10
    assert kept(Retention(10), 3) == 3


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
    """Float32 scores are compared with float64 scores: sets could differ only if two scores agree to 7 digits."""
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


# --- Scores of a prompt against loops over transformers' own attention ----------------------------------------------


def save_capped_model(folder: Path) -> Path:
    """A small Gemma 2 whose layers all have full attention, with a soft cap that most scores feel."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=CAP,
        initializer_range=0.25, layer_types=["full_attention"] * 3, bos_token_id=None, eos_token_id=5,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


@cache
def prompt_and_eager(architecture: str, entries: int = 180) -> tuple[list[PromptLayer], list[EagerLayer]]:
    """A random prompt as selectors see it, and the same layers from transformers' own eager attention, in float64."""
    tokens = random_document("brute", entries).tokens
    statistics = [statistic for name in SELECTORS for statistic in build_selector(name, {}).statistics]
    with TemporaryDirectory() as name:
        folder, capped = Path(name), architecture == "gemma2"
        saved = save_capped_model(folder) if capped else save_random_model(folder, architecture, layers=3)
        model = load_model(str(saved)) if capped else random_model(architecture, layers=3)
        network = load_eager(saved).double()
    prompt = Prompt(model, tokens, 64, [*statistics, QueryMoments(0)])
    hidden: list[Tensor] = []
    for layer in network.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, inputs: hidden.append(inputs["hidden_states"][0]), with_kwargs=True
        )
    cache = DynamicCache()
    with torch.no_grad():
        output = network(torch.tensor([tokens]), past_key_values=cache, output_attentions=True)
        queries = [layer.self_attn.q_proj(h) for layer, h in zip(network.model.layers, hidden, strict=True)]
    angles = network.model.rotary_emb.inv_freq.double().numpy()
    parts = zip(output.attentions, cache.layers, queries, strict=True)
    eager = [
        EagerLayer(
            attention=attention[0].numpy(), key=layer.keys[0].numpy(), value=layer.values[0].numpy(),
            query=query.view(entries, 4, 16).transpose(0, 1).numpy(), angles=angles,
            softcap=network.config.attn_logit_softcapping if capped else None,
        )
        for attention, layer, query in parts
    ]  # fmt: skip
    return prompt.layers, eager


@dataclass(frozen=True)
class EagerLayer:
    """One layer: attention [heads, n, n], rotated keys, values [KV heads, n, size], queries before rotation."""

    attention: NDArray[np.float64]
    key: NDArray[np.float64]
    value: NDArray[np.float64]
    query: NDArray[np.float64]
    angles: NDArray[np.float64]  # [size / 2], per position
    softcap: float | None

    def of_kv_head(self, kv_head: int) -> slice:
        """The query heads of a KV head."""
        group = len(self.query) // len(self.key)
        return slice(kv_head * group, (kv_head + 1) * group)


def h2o_scores(layer: EagerLayer, kv_head: int) -> list[float]:
    return [float(column.sum()) / 2 for column in layer.attention[layer.of_kv_head(kv_head)].transpose(2, 0, 1)]


def tova_scores(layer: EagerLayer, kv_head: int) -> list[float]:  # noqa: ARG001 - the layer's, for all KV heads
    return list(np.mean([attention[-1] for attention in layer.attention], axis=0))


def knorm_scores(layer: EagerLayer, kv_head: int) -> list[float]:
    return [-float(sum(x * x for x in key)) for key in layer.key[kv_head]]


def keydiff_scores(layer: EagerLayer, kv_head: int) -> list[float]:
    """Minus the sum of cosines to every key: the mean of normalized keys, without its length, orders in the same way."""
    unit = [key / np.sqrt(key @ key) for key in layer.key[kv_head]]
    return [-sum(float(one @ other) for other in unit) for one in unit]


def snapkv_scores(layer: EagerLayer, kv_head: int, window: int = 64, kernel: int = 5) -> list[float]:
    """Five neighbours' mean attention from the window, 0 beyond both ends."""
    received = layer.attention[layer.of_kv_head(kv_head), -window:, :-window].mean(axis=(0, 1))
    return list(np.convolve(received, np.full(kernel, 1 / kernel), "same"))


def expected_weights(
    mean: NDArray[np.float64], deviation: NDArray[np.float64], softcap: float | None
) -> NDArray[np.float64]:
    """E exp(x) of normal logits [n], or E exp(c tanh(x / c)) with a cap, as a sum over a fine grid."""
    if softcap is None:
        return np.asarray(np.exp(mean + deviation**2 / 2))
    grid = np.linspace(-9, 9, 4001)
    density = np.exp(-(grid**2) / 2) / np.exp(-(grid**2) / 2).sum()
    logits = mean[:, None] + deviation[:, None] * grid
    return np.asarray(np.exp(softcap * np.tanh(logits / softcap)) @ density)


def expected_attention_scores(layer: EagerLayer, kv_head: int, sinks: int = 4, future: int = 512) -> list[float]:
    """Every query is turned by the mean of all future rotations, as complex numbers; k'q has a mean and a variance."""
    entries, half = layer.key.shape[1], layer.key.shape[2] // 2
    turn = np.mean([np.exp(1j * layer.angles * position) for position in range(entries, entries + future)], axis=0)
    expected = np.zeros(entries - sinks)
    for head in range(*layer.of_kv_head(kv_head).indices(len(layer.query))):
        query = (layer.query[head, sinks:, :half] + 1j * layer.query[head, sinks:, half:]) * turn
        logits = layer.key[kv_head, sinks:] @ np.concatenate([query.real, query.imag], axis=1).T / 4.0
        weights = expected_weights(logits.mean(axis=1), logits.std(axis=1), layer.softcap)
        expected += weights / weights.sum() / 2
    length = [float(np.sqrt(value @ value)) for value in layer.value[kv_head, sinks:]]
    return [*([np.inf] * sinks), *(expected * length)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize(
    ("name", "scores", "last"),
    [
        ("h2o", h2o_scores, lambda kept: kept // 2), ("tova", tova_scores, lambda _: 1),
        ("snapkv", snapkv_scores, lambda _: 64),
        ("knorm", knorm_scores, lambda _: 0), ("keydiff", keydiff_scores, lambda _: 0),
        ("expected_attention", expected_attention_scores, lambda _: 0),
    ],
)  # fmt: skip
@pytest.mark.by_default("qwen2", "gemma2")
def test_scores_are_those_of_the_definition(
    name: str, scores: Callable[[EagerLayer, int], list[float]], last: Callable[[int], int], architecture: str
) -> None:
    """No position outside scores higher than one inside, but for what float32 leaves open: 5 digits.

    Ties are real: in the first layer a token's key has one norm wherever it stands.
    """
    prompt, eager = prompt_and_eager(architecture)
    for kept in (70, 90, 179):
        cache, before = evict(prompt, build_selector(name, {}), kept), 180 - last(kept)
        for layer, index in zip(eager, cache.indices, strict=True):
            for kv_head, chosen in enumerate(index.tolist()):
                scored = np.array(scores(layer, kv_head))
                assert chosen[kept - last(kept) :] == list(range(before, 180))
                inside = chosen[: kept - last(kept)]
                outside = sorted(set(range(before)) - set(inside))
                least, most = scored[inside].min(), scored[outside].max()
                assert least >= most - 1e-5 * abs(most)


def test_expected_attention_adds_epsilon_before_the_values() -> None:
    """A large one leaves the values' norms alone to decide."""
    prompt, eager = prompt_and_eager("llama")
    cache = evict(prompt, build_selector("expected_attention", {"epsilon": 1e9, "sinks": 0}), 60)
    for layer, index in zip(eager, cache.indices, strict=True):
        for kv_head, chosen in enumerate(index.tolist()):
            length = np.linalg.norm(layer.value[kv_head], axis=-1)
            assert chosen == sorted(sorted(range(180), key=lambda place, length=length: -length[place])[:60])


def test_accumulated_attention_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are over 180 queries at once or over 7. Each row sums to 1, so all sum to n; float32 logits round differently."""
    prompt, _ = prompt_and_eager("qwen2")
    whole = [layer.gathered(AccumulatedAttention()) for layer in prompt]
    monkeypatch.setattr(h2o, "_LOGITS", 7 * 4 * 180)
    tokens = random_document("brute", 180).tokens
    again = Prompt(random_model("qwen2", layers=3), tokens, 1, [AccumulatedAttention()]).layers
    for one, layer in zip(whole, again, strict=True):
        other = layer.gathered(AccumulatedAttention())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # 180 weights, 6e-8 each
        torch.testing.assert_close(other.sum(-1), torch.full((2,), 180.0, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("gibibytes", "logits"), [(8, 2**24), (23.6, 2**24), (39.4, 2**25), (79.2, 2**26), (79.6, 2**26), (139.7, 2**27)]
)
def test_blocks_of_accumulated_attention_follow_a_gpus_memory(
    gibibytes: float, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps, so that all GPUs of a kind have one size; a CPU's never changes."""
    memory = SimpleNamespace(total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: memory)
    assert h2o.logits_at_once(torch.device("cuda", 1)) == logits
    assert h2o.logits_at_once(torch.device("cpu")) == 2**24


def test_what_nobody_asks_for_is_not_gathered() -> None:
    model, tokens = random_model("llama", layers=3), random_document("brute", 180).tokens
    layers = Prompt(model, tokens, 8).layers
    assert not any(layer.statistics for layer in layers)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.network.model.layers)
    prompt = Prompt(model, tokens, 8, [AccumulatedAttention(), QueryMoments(4), AccumulatedAttention()])
    assert [set(layer.statistics) for layer in prompt.layers] == [{AccumulatedAttention(), QueryMoments(4)}] * 3
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.network.model.layers)
    assert torch.equal(prompt.first_distribution, Prompt(model, tokens, 8).first_distribution)
    prompt.forget_statistics()
    assert not any(layer.statistics for layer in prompt.layers)


# --- Budgets of layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 7, 32])
@pytest.mark.parametrize("beta", [1, 20, 1000])
@pytest.mark.parametrize("entries", [65, 401, 32768])
def test_pyramid_budgets(entries: int, beta: int, layers: int) -> None:
    """Exactly m on average, never more than n nor less than the window, falling, and within 1 of the line."""
    selector = build_selector("pyramidkv", {"beta": beta})
    for kept in sorted({64, 65, 70, entries // 3, entries // 2, entries * 9 // 10, entries - 1}):
        if not 64 <= kept < entries:
            continue
        budgets = list(selector.budgets(kept, entries, layers))
        assert sum(budgets) == kept * layers
        assert entries >= budgets[0]
        assert budgets[-1] >= 64
        assert budgets == sorted(budgets, reverse=True)
        low = (kept - 64) / beta
        high = 2 * (kept - 64) - low
        if high > entries - 64:
            high, low = entries - 64, 2 * (kept - 64) - (entries - 64)
        line = np.linspace(high, low, layers) if layers > 1 else [kept - 64]
        assert np.abs(np.array(budgets) - 64 - line).max() < 1
        if beta == 1:
            assert set(budgets) == {kept}


def test_pyramid_layers_keep_what_snapkv_keeps_of_their_number() -> None:
    prompt, _ = prompt_and_eager("llama")
    cache = evict(prompt, build_selector("pyramidkv", {"window": 16, "kernel": 3}), 90)
    assert cache.extents[:, 1].tolist() == [160, 90, 20]  # 16 and: 144.3, 74, 3.7
    assert cache.kept_entries == 90
    snapkv = SnapKV(window=16, kernel=3)
    for number, (layer, index) in enumerate(zip(prompt, cache.indices, strict=True)):
        assert torch.equal(index, evict([layer], snapkv, len(index[0])).indices[0]), number


# --- Random sets -----------------------------------------------------------------------------------------------------


def test_random_sets_differ_by_all_that_names_them_and_grow_with_m() -> None:
    model = random_model("llama", layers=3)
    sets = {}
    for prompt, seed in product(("one", "two"), (0, 1)):
        layers = Prompt(model, random_document(prompt, 300).tokens, 1).layers
        small, large = (evict(layers, build_selector("random", {"seed": seed}), kept).indices for kept in (100, 150))
        for number, (few, more) in enumerate(zip(small, large, strict=True)):
            for head in range(2):
                sets[prompt, seed, number, head] = tuple(few[head].tolist())
                assert set(few[head].tolist()) < set(more[head].tolist())
    assert len(set(sets.values())) == len(sets) == 2 * 2 * 3 * 2


def test_random_sets_are_uniform() -> None:
    """Each of 40 positions stays in 30% of 2,000 sets: a chi-square of 39 degrees passes 90 with probability 6e-6."""
    selector, counts = build_selector("random", {}), np.zeros(40)
    key = torch.zeros(2000, 40, 1)
    layer = PromptLayer(key, key, key, 1.0, prompt=b"some")
    for chosen in selector.keep(layer, 12).numpy():
        counts[chosen] += 1
    assert counts.sum() == 24_000
    assert (((counts - 600) ** 2 / 600).sum() / 0.7) < 90  # without replacement: the variance is 600 * .7


# --- Broken promises and wrong parameters ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Returning(Selector):
    """Two sinks and the latest positions, as ``made`` returns them, and budgets as ``shared`` returns them."""

    summary: ClassVar[str] = "returning"
    made: Callable[[Tensor], Any] = Tensor.clone
    shared: Callable[[int, int, int], Any] = lambda kept, _, layers: [kept] * layers
    window: int = 8
    sinks: int = 2

    def budgets(self, kept: int, entries: int, layers: int) -> Sequence[int]:
        found: Sequence[int] = self.shared(kept, entries, layers)
        return found

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        found: Tensor = self.made(Recent(self.sinks).keep(layer, kept).clone())
        return found


def put(rows: Any, columns: Any, values: Any) -> Callable[[Tensor], Tensor]:
    """Replace some of the positions 0, 1, 32, ..., 59 of each head."""

    def made(index: Tensor) -> Tensor:
        index[rows, columns] = torch.tensor(values)
        return index

    return made


@pytest.mark.parametrize(
    "made",
    [
        put(1, [3, 4], [34, 33]), put(0, 3, 34),  # not in order; one twice
        lambda index: index[:, :-1], lambda index: torch.cat([index[:, :2], index[:, :1] + 2, index[:, 2:]], 1),
        lambda index: index[:1], put([0, 1], 0, -1), put([0, 1], -1, 60),  # one head; before and beyond the prompt
        put(1, slice(-8, None), range(51, 59)), put(1, 1, 5),  # not the window; not the sinks
    ],
)  # fmt: skip
def test_a_broken_promise_is_an_operation_error(made: Callable[[Tensor], Any]) -> None:
    evict(prompt_of(60), Returning(), 30)
    line = refused(evict, prompt_of(60), Returning(made), 30, error=OperationError)
    assert line.startswith("selector Returning: wrong positions in layer 0; it must return exactly 30")


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (Tensor.tolist, "a list"), (Tensor.numpy, "a ndarray"), (Tensor.float, "torch.float32 on cpu"),
        (Tensor.bool, "torch.bool on cpu"), (lambda index: index.to("meta"), "torch.int64 on meta"),
        (lambda _: None, "a NoneType"),
    ],
)  # fmt: skip
def test_what_are_no_positions_is_an_operation_error(made: Callable[[Tensor], Any], what: str) -> None:
    line = refused(evict, prompt_of(60), Returning(made), 30, error=OperationError)
    assert line.startswith(f"selector Returning: returned {what} in layer 0; ")


@pytest.mark.parametrize(
    ("shared", "says"),
    [
        (lambda kept, *_: [kept], "returned 1 budgets with the sum 30"),
        (lambda kept, *_: [kept, kept - 1], "returned 2 budgets with the sum 59"),
        (lambda kept, *_: [9, 2 * kept - 9], "returned budgets [9, 51]; each layer must keep 10 to 60"),
        (lambda kept, n, _: [n + 1, 2 * kept - n - 1], "returned budgets [61, -1]; each layer must keep 10 to 60"),
        (lambda kept, *_: [kept / 1] * 2, "returned budgets [30.0, 30.0]; "),
        (lambda kept, *_: [kept // 0], "ZeroDivisionError: "),
    ],
)
def test_broken_budgets_are_an_operation_error(shared: Callable[[int, int, int], Any], says: str) -> None:
    line = refused(evict, prompt_of(60), Returning(shared=shared), 30, error=OperationError)
    assert line.startswith(f"selector Returning: {says}")


def test_a_layer_without_entries_is_an_operation_error() -> None:
    """The products of no entries end the process."""
    nothing = Returning(shared=lambda *_: [0, 60], window=0, sinks=0)
    assert "[0, 60]; each layer must keep 1 to 60" in refused(evict, prompt_of(60), nothing, 30, error=OperationError)


def test_parameters_reach_the_selector() -> None:
    action = build_action(ActionSection(name="mine", selector="snapkv", keep="1/2", window=32, kernel=7))
    assert action == Action("mine", "snapkv", SnapKV(window=32, kernel=7), Retention(Fraction(1, 2)))
    assert build_action(ActionSection(name="all", selector="full", keep="all")).selector == Full()
    assert not action.control
    expected = build_action(ActionSection(name="x", selector="expected_attention", keep=512, epsilon=1)).selector
    assert expected == build_selector("expected_attention", {"epsilon": 1.0})


def test_parameters_without_a_column_are_recorded_as_json() -> None:
    def recorded(name: str, **parameters: int) -> str | None:
        row = build_action(ActionSection(name="x", selector=name, keep=512, **parameters)).row("s", prespecified=True)
        assert set(row) == set(ACTIONS.columns)
        return row["parameters"]

    assert recorded("snapkv", window=32) is None  # an action of an older store has the same row
    assert recorded("recent") is None
    assert recorded("pyramidkv", window=32, beta=10) == '{"beta": 10}'
    assert recorded("random") == '{"seed": 0}'
    assert recorded("expected_attention", sinks=2) == '{"epsilon": 0.0, "future_positions": 512}'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('selector = "recent"', 'selektor = "recent"'), "actions[1].selektor: unknown key; did you mean 'selector'?"),
        (('keep = "1/2"', 'keeep = "1/2"'), "actions[0].keeep: unknown key; did you mean 'keep'?"),
        (('name = "recent-half"', 'nme = "recent-half"'), "actions[1].nme: unknown key; did you mean 'name'?"),
        (('keep = "1/2"', ""), "actions[0].keep: missing"),
        (('keep = "1/2"', 'keep = "1/2"\nwindow = [64]'), "actions[0].window = [64]: should be a valid integer or"),
    ],
)
def test_an_actions_own_keys_are_told_from_its_selectors(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    assert says in refused(load_study, write_study(tmp_path, change))
