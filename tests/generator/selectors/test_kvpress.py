"""Presses of kvpress as selectors: agreement with native definitions and with kvpress's own run, and refusals.

Tests marked ``kvpress`` need it; ``make kvpress`` installs it and runs them.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fixtures.families import saved_tower
from fixtures.refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from kvdrift.generator.actions import build_action
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import random_document, random_model, save_random_model
from kvdrift.generator.selectors import build_selector, kvpress
from kvdrift.generator.selectors.h2o import AccumulatedAttention
from kvdrift.generator.selectors.kvpress import PRESSES, load_kvpress
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.errors import OperationError
from kvdrift.schema.study import ActionSection

LAYERS = 3
needs_kvpress = pytest.mark.kvpress
every_architecture = pytest.mark.parametrize("architecture", ["llama", "qwen2"])


def action(selector: str, **parameters: Any) -> Any:
    return build_action(ActionSection(name="mine", selector=selector, keep="1/2", **parameters))


# --- Names: without kvpress ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("press", ["AdaKVPress", "KeyRerotationPress", "NoPress"])
def test_what_is_no_pure_selection_is_refused_and_the_engine_named(press: str) -> None:
    line = refused(action, f"kvpress:{press}")
    assert line.startswith(f"action 'mine': selector 'kvpress:{press}': ")
    assert 'engine = "transformers"' in line


@pytest.mark.parametrize("missing", ["kvpress", "datasets"])
def test_without_kvpress_the_error_says_how_to_install_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        if missing == "kvpress":
            raise PackageNotFoundError(missing)
        return kvpress.VERSION

    def import_module(_: str) -> None:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(kvpress, "version", version)
    monkeypatch.setattr(kvpress.importlib, "import_module", import_module)
    line = refused(action, "kvpress:SnapKVPress")
    assert f"'{missing}' is not installed" in line
    assert "'kvdrift[kvpress]'" in line


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpress, "version", lambda _: "0.6.0")
    line = refused(action, "kvpress:SnapKVPress")
    assert "kvpress 0.6.0 " in line
    assert "kvpress 0.5.5" in line


# --- Native definitions ----------------------------------------------------------------------------------------------


@cache
def gemma_3() -> Path:
    """Gemma 3 with a vision tower, and keys of unequal norm, which a random model's normalized keys have not."""
    whole = saved_tower("gemma3")
    folder = Path(copytree(whole, whole.with_name("unequal-norms")))
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("k_norm.weight"):
            tensors[name] = torch.rand(tensor.shape, generator=random)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@cache
def prompt_of(architecture: str, entries: int) -> tuple[PromptLayer, ...]:
    """The layers with full attention of a random prompt, with everything that a selector of this module asks for."""
    names = ("h2o", "expected_attention", "kvpress:SnapKVPress", "kvpress:KnormPress")
    statistics = [statistic for name in names for statistic in build_selector(name, {}).statistics]
    document = random_document(f"kvpress-{entries}", entries)
    model = load_model(str(gemma_3())) if architecture == "gemma3" else random_model(architecture, layers=LAYERS)
    layers = Prompt(model, document.tokens, 64, statistics).layers
    return tuple(layer for layer in layers if layer.terms.window is None)


SIZES = [(n, kept) for n in (401, 777, 1000) for kept in (n // 5, n // 2, n * 9 // 10)]


@needs_kvpress
@every_architecture
@pytest.mark.parametrize(
    ("native", "press"),
    [
        ("snapkv", "SnapKVPress"), ("recent", "StreamingLLMPress"), ("knorm", "KnormPress"), ("tova", "TOVAPress"),
        ("keydiff", "KeyDiffPress"), ("expected_attention", "ExpectedAttentionPress"),
    ],
)  # fmt: skip
def test_native_selectors_and_presses_keep_the_same_sets(native: str, press: str, architecture: str) -> None:
    """All selectors agree at three lengths and three retentions. Only Knorm may swap ties.

    In the first layer a token's key has the same norm wherever it stands, up to the rounding of its rotation; where
    two norms are equal to the last bit kvpress's top-k takes any of them.
    """
    for entries, kept in SIZES:
        prompt = prompt_of(architecture, entries)
        ours, theirs = (evict(prompt, build_selector(name, {}), kept) for name in (native, f"kvpress:{press}"))
        for layer, one, other in zip(prompt, ours.indices, theirs.indices, strict=True):
            if native == "knorm":
                norms = torch.linalg.vector_norm(layer.key, dim=-1)
                one, other = (norms.gather(1, index.long()).sort().values for index in (one, other))  # noqa: PLW2901
            assert torch.equal(one, other)


@needs_kvpress
@every_architecture
def test_pyramidkv_differs_in_budgets_alone(architecture: str) -> None:
    """kvpress counts the window within the falling part, and uses equal layers if the last has less than the window.

    Given the same number, a layer keeps the same set.
    """
    differ = False
    for entries, kept in SIZES:
        prompt = prompt_of(architecture, entries)
        native, press = build_selector("pyramidkv", {}), build_selector("kvpress:PyramidKVPress", {})
        budgets = native.budgets(kept, entries, LAYERS)
        differ |= list(budgets) != list(press.budgets(kept, entries, LAYERS))
        for layer, budget in zip(prompt, budgets, strict=True):
            if budget < entries:
                assert torch.equal(native.keep(layer, budget), press.keep(layer, budget))
    assert differ


@needs_kvpress
@pytest.mark.parametrize("layers", [2, 3, 5, 7, 32])
def test_budgets_of_the_pyramid_press_are_its_own_made_exact(layers: int) -> None:
    """Its rounding may miss the sum by an entry, which the first layer makes up: so for 392 of 777 in 5 layers."""
    selector = build_selector("kvpress:PyramidKVPress", {})
    press = load_kvpress().PyramidKVPress(compression_ratio=0.0)
    missed = 0
    for entries, kept in [*SIZES, (777, 392), (4096, 1501), (32768, 3277), (4096, 3001)]:
        budgets = list(selector.budgets(kept, entries, layers))
        assert sum(budgets) == kept * layers
        press.compression_ratio = 1 - kept / entries
        config = type("Config", (), {"num_hidden_layers": layers})
        modules = [type("Module", (), {"config": config, "layer_idx": number}) for number in range(layers)]
        own = [press.get_layer_budget(module, entries) for module in modules]
        missed += sum(own) != sum(budgets)
        assert all(abs(m - n) <= 1 for m, n in zip(budgets, own, strict=True))
    assert missed == (layers == 5)


@needs_kvpress
@every_architecture
def test_observed_attention_is_accumulated_attention_per_query(architecture: str) -> None:
    """H2O's sums, divided by the number of queries that could see a position, and no recent half."""
    for entries, kept in SIZES:
        prompt = prompt_of(architecture, entries)
        theirs = evict(prompt, build_selector("kvpress:ObservedAttentionPress", {}), kept)
        for layer, index in zip(prompt, theirs.indices, strict=True):
            mean = layer.gathered(AccumulatedAttention()) / torch.arange(entries, 0, -1)
            assert torch.equal(mean.topk(kept).indices.sort().values, index.long())


# --- kvpress as it is published --------------------------------------------------------------------------------------

# They draw from the global generator, which nothing seeds: other sets in every run.
DRAWING = {"RandomPress", "LeverageScorePress", "CompactorPress"}
CHUNKED = {"ChunkPress", "ChunkKVPress"}


@cache
def published_model(architecture: str, attention: str) -> Any:
    """The random model with an attention of transformers, apart from ours: kvpress puts modules and hooks on it."""
    load_kvpress()
    if architecture == "gemma3":
        loading = AutoModelForImageTextToText.from_pretrained
        network = loading(gemma_3(), attn_implementation=attention, dtype=torch.float32).eval()
        rotary = network.model.language_model.rotary_emb
        forward = rotary.forward  # kvpress does not name a type of layers, as Gemma 3 in this transformers asks
        rotary.forward = lambda inner, places, kind="full_attention": forward(inner, places, kind)
        return network
    with TemporaryDirectory() as folder:
        save_random_model(Path(folder), architecture, layers=LAYERS)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()


def published(press: Any, architecture: str, attention: str, entries: int) -> list[list[list[int]]]:
    """Positions kept per layer and KV head by kvpress's own hooks, found by the nearest key of the whole prompt."""
    tokens = torch.tensor([random_document(f"kvpress-{entries}", entries).tokens])
    network, cache = published_model(architecture, attention), DynamicCache()
    with torch.no_grad(), press(network):
        language_model = getattr(network.model, "language_model", network)
        language_model(tokens, past_key_values=cache, cache_position=torch.arange(entries))
    kept = []
    kinds = getattr(language_model.config, "layer_types", None) or ["full_attention"] * LAYERS
    full = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind == "full_attention"]
    for layer, whole in zip(full, prompt_of(architecture, entries), strict=True):
        distance: Tensor = torch.cdist(layer.keys[0], whole.key, compute_mode="donot_use_mm_for_euclid_dist")
        assert float(distance.amin(-1).max()) < 1e-3
        kept.append(distance.argmin(-1).sort().values.tolist())
    return kept


@needs_kvpress
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("press", sorted(set(PRESSES) - DRAWING))
def test_sets_are_those_of_a_run_of_kvpress(press: str, architecture: str) -> None:
    """Without our gathering, ratio and search for indices: hooks on a model that has nothing to do with ours.

    Of Gemma 3, which has its vision tower here, kvpress leaves out the layers with a window, but its pyramid counts them.
    """
    if (press, architecture) == ("PyramidKVPress", "gemma3"):
        pytest.skip("the pyramid is over other layers")
    kvpress, entries = load_kvpress(), 777
    for kept in (155, 388, 699):
        selector = build_selector(f"kvpress:{press}", {})
        # PyramidKV rounds its budgets, and needs the ratio itself.
        ratio = 1 - (kept if press == "PyramidKVPress" else kept + 0.5) / entries
        inner = PRESSES[press].press
        wrapped = {} if inner is None else {"press": getattr(kvpress, inner)(compression_ratio=ratio)}
        theirs = getattr(kvpress, press)(**wrapped or {"compression_ratio": ratio})
        attention = "eager" if PRESSES[press].attention else "sdpa"
        ours = evict(prompt_of(architecture, entries), selector, kept)
        for index, sets in zip(ours.indices, published(theirs, architecture, attention, entries), strict=True):
            for one, other in zip(index.tolist(), sets, strict=True):
                if press in CHUNKED:
                    assert 0 <= len(one) - len(other) < 20  # what did not make a whole chunk is left out
                    assert set(other) <= set(one)
                else:
                    assert one == other


# --- What the adapter makes exact ------------------------------------------------------------------------------------


@needs_kvpress
@every_architecture
def test_whole_chunks_are_filled_up(architecture: str) -> None:
    """ChunkKV: the best chunks whole, one more from its beginning; the same for all heads, and growing with m."""
    prompt = prompt_of(architecture, 401)
    before: list[set[int]] = [set()] * LAYERS
    for kept in (64, 79, 80, 81, 99, 150, 400):
        cache = evict(prompt, build_selector("kvpress:ChunkKVPress", {}), kept)
        for number, index in enumerate(cache.indices):
            assert torch.equal(index[0], index[1])
            chosen = set(index[0].tolist())
            whole, partial = 0, []
            for chunk in range(0, 401, 20):
                inside = sorted(chosen & set(range(chunk, min(chunk + 20, 401))))
                whole += len(inside) == min(20, 401 - chunk)
                if 0 < len(inside) < min(20, 401 - chunk):
                    partial.append(inside)
            assert len(partial) <= 1
            assert all(inside == list(range(inside[0], inside[0] + len(inside))) for inside in partial)
            assert whole >= kept // 20 - 1
            assert before[number] <= chosen
            before[number] = chosen


@needs_kvpress
def test_options_reach_the_press_and_the_one_inside() -> None:
    chosen = action("kvpress:ChunkKVPress", chunk_length=7, press="SnapKVPress", window_size=16)
    row = chosen.row("study", prespecified=True)
    assert row["selector"] == "kvpress:ChunkKVPress"
    assert row["parameters"] == (
        '{"chunk_length": 7, "kvpress": "0.5.5", "press": {"SnapKVPress": {"kernel_size": 5, "window_size": 16}}}'
    )
    press = chosen.selector.build(0.25)
    assert (press.chunk_length, press.press.window_size, press.press.compression_ratio) == (7, 16, 0.25)
    assert action("kvpress:SnapKVPress", window_size=16).selector.window == 16
    assert action("kvpress:StreamingLLMPress", n_sink=0).selector.sinks == 0


@needs_kvpress
@pytest.mark.parametrize(
    ("press", "parameters", "says"),
    [
        ("SnapKVPress", {"window_sise": 8}, "window_sise: unknown key; did you mean 'window_size'?"),
        ("KnormPress", {"n_sink": 8}, "selector 'kvpress:KnormPress' has no parameter 'n_sink'; it takes none"),
        ("BlockPress", {"x": 8}, "selector 'kvpress:BlockPress' has no parameter 'x'; it takes block_size, press"),
        ("SnapKVPress", {"compression_ratio": 0.5}, "selector 'kvpress:SnapKVPress' has no parameter 'compression_ratio'"),
        ("SnapKVPress", {"window_size": 0.5}, "window_size = 0.5: "),
        ("EntropyGatedChunkKVPress", {"chunk_length": 3}, "selector 'kvpress:EntropyGatedChunkKVPress': "),
    ],
)  # fmt: skip
def test_a_wrong_option_is_the_users_mistake(press: str, parameters: dict[str, Any], says: str) -> None:
    assert refused(action, f"kvpress:{press}", **parameters).startswith(f"action 'mine': {says}")


@needs_kvpress
def test_what_a_press_cannot_do_is_said_in_one_line() -> None:
    selector = build_selector("kvpress:ChunkKVPress", {})  # SnapKV inside, with a window of 64
    prompt = Prompt(random_model("llama", layers=LAYERS), random_document("x", 50).tokens, 1, selector.statistics)
    line = refused(evict, prompt.layers, selector, 25, error=OperationError)
    assert line.startswith("kvpress:ChunkKVPress cannot keep 25 of 50 prompt entries: ")
    assert "64" in line


@needs_kvpress
def test_altered_entries_are_no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyRerotationPress, let in, has keys that are not the prompt's."""
    monkeypatch.setitem(PRESSES, "KeyRerotationPress", kvpress.Press(press="KnormPress"))
    selector = build_selector("kvpress:KeyRerotationPress", {})
    line = refused(evict, prompt_of("llama", 401), selector, 200, error=OperationError)
    assert line.startswith("kvpress:KeyRerotationPress returned an entry ")


@needs_kvpress
def test_equal_entries_are_all_found() -> None:
    """Two positions have equal key and value, so kept entries count twice."""
    layer = prompt_of("llama", 401)[0]
    key, value = layer.key.clone(), layer.value.clone()
    key[:, 100:103], value[:, 100:103] = key[:, :1] * 1e-3, value[:, :1]  # short keys: Knorm keeps them
    twin = PromptLayer(key, value, layer.window_query, layer.scaling, 0, b"", layer.statistics)
    index = evict([twin], build_selector("kvpress:KnormPress", {}), 50).indices[0]
    assert all({100, 101, 102} <= set(head.tolist()) for head in index)


# --- Isolation -------------------------------------------------------------------------------------------------------


UNTOUCHED = """
import sys
sys.path.insert(0, "tests")
import torch
from pathlib import Path
from tempfile import TemporaryDirectory
from kvdrift.generator.checks.random_models import random_document, random_model, save_random_model
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from kvdrift.generator.attention.interface import IMPLEMENTATION, _attend
from kvdrift.generator.transformer.prompts.eviction import evict
from kvdrift.generator.selectors import build_selector
from kvdrift.generator.selectors.kvpress import PRESSES
from kvdrift.generator.transformer.prompts.prompt import Prompt

tokens = random_document("x", 300).tokens
ours = random_model("qwen2", layers=2)
with TemporaryDirectory() as folder:
    save_random_model(Path(folder), "llama")
    other = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def state():
    with torch.no_grad():
        logits = other(torch.tensor([tokens])).logits
    modules = [[name for name, _ in network.named_modules()] for network in (ours.network, other)]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for n in (ours.network, other) for m in n.modules()]
    distribution = Prompt(ours, tokens, 1).first_distribution
    return dict(ALL_ATTENTION_FUNCTIONS), modules, hooks, logits, distribution, torch.get_rng_state()


before = state()
assert before[0][IMPLEMENTATION] is _attend
assert "kvpress" not in sys.modules
for press in PRESSES:
    selector = build_selector("kvpress:" + press, {})
    evict(Prompt(ours, tokens, selector.window, selector.statistics).layers, selector, 150)
assert "kvpress" in sys.modules
after = state()
assert before[0].keys() == after[0].keys()
assert all(function is after[0][name] for name, function in before[0].items())
assert not ALL_ATTENTION_FUNCTIONS._local_mapping, "functions lie where they lay"
assert before[1:3] == after[1:3]
assert not sum(after[2])
assert all(torch.equal(one, two) for one, two in zip(before[3:], after[3:]))

sys.modules["kvpress"].patch_attention_functions()
assert ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] is not _attend, "what importing kvpress does by itself"
print("untouched")
"""


@needs_kvpress
def test_attention_and_models_are_left_untouched() -> None:
    """In a process that has not imported kvpress, functions, modules, hooks, logits and draws stay the same."""
    run = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("untouched")
