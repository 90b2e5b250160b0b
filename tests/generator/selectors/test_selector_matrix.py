"""What every selector must hold, whatever it scores by. A selector joins by being registered.

Presses of kvpress join by being listed as pure selections; they are marked ``kvpress`` and run by ``make kvpress``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from fixtures.random_models import random_document, random_model

from generator.actions import Action, build_action
from generator.attention.recording import PromptLayer
from generator.attention.statistics import QueryChunk
from generator.generation import PendingUnit, generate_units
from generator.selectors import SELECTORS, Recent, Selector, build_selector
from generator.selectors.kvpress_presses import PRESSES
from generator.transformer.eviction import CompactCache, evict
from generator.transformer.prompt import Prompt
from schema.retention import Retention
from schema.study import ActionSection

LAYERS, KV_HEADS, SIZE = 3, 2, 16
NAMES = [*SELECTORS, *(pytest.param(f"kvpress:{press}", marks=pytest.mark.kvpress) for press in PRESSES)]

# Prompt and kept entries: one chunk and two of 1,024, one below the 260 that LagKV needs to score, one kept nearly whole.
SIZES = [(401, 133), (1100, 550), (200, 99), (150, 149)]

every_selector = pytest.mark.parametrize("name", NAMES)
every_architecture = pytest.mark.parametrize("architecture", ["llama", "qwen2"])


@cache
def prompt_of(name: str, entries: int, architecture: str = "llama", dtype: str = "float32") -> Prompt:
    """A prompt with what the selector asks to see of it."""
    selector = build_selector(name, {})
    document = random_document(f"matrix-{entries}", entries)
    return Prompt(random_model(architecture, dtype, LAYERS), document.tokens, selector.window, selector.statistics)


def kept_by(name: str, entries: int, kept: int, architecture: str = "llama", dtype: str = "float32") -> CompactCache:
    """What the selector leaves of that prompt; ``full`` leaves everything or nothing can be said of it."""
    layers = prompt_of(name, entries, architecture, dtype).layers
    return evict(layers, build_selector(name, {}), entries if name == "full" else kept)


@every_architecture
@every_selector
def test_counts_are_exact_and_sets_are_sound(name: str, architecture: str) -> None:
    """Exactly m per head and layer (on average where layers differ), sorted, in range, window and sinks inside."""
    selector = build_selector(name, {})
    for entries, m in SIZES:
        cache, kept = kept_by(name, entries, m, architecture), entries if name == "full" else m
        budgets = list(selector.budgets(kept, entries, LAYERS))
        assert cache.kept_entries == kept
        assert sum(budgets) == kept * LAYERS
        assert cache.extents.tolist() == [[entries, budget] for budget in budgets]
        prompt = prompt_of(name, entries, architecture).layers
        for layer, left, index, budget in zip(prompt, cache.layers, cache.indices, budgets, strict=True):
            assert index.shape == (KV_HEADS, budget)
            assert left.key.shape == left.value.shape == (KV_HEADS, budget, SIZE)
            for head in range(KV_HEADS):
                chosen = index[head].tolist()
                assert chosen == sorted(set(chosen))
                assert set(chosen) <= set(range(entries))
                assert set(range(entries - selector.window, entries)) <= set(chosen)
                assert set(range(selector.sinks)) <= set(chosen)
                assert torch.equal(left.key[head], layer.key[head, chosen])
                assert torch.equal(left.value[head], layer.value[head, chosen])


@every_selector
def test_half_precision_is_as_exact(name: str) -> None:
    cache = kept_by(name, 401, 133, "qwen2", "bfloat16")
    assert cache.kept_entries == (401 if name == "full" else 133)
    assert cache.layers[0].key.dtype == torch.bfloat16


@every_selector
def test_choices_depend_on_the_prompt_alone(name: str) -> None:
    """Prefilled again, after other draws, beside a selector that asks for more: the same sets, and no draw is used up."""
    cache, model = kept_by(name, 401, 133), random_model("llama", "float32", LAYERS)
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    selector = build_selector(name, {})
    asked = (*build_selector("h2o", {}).statistics, *selector.statistics)
    again = Prompt(model, random_document("matrix-401", 401).tokens, 128, asked)
    assert evict(again.layers, selector, cache.kept_entries).kept_sha256 == cache.kept_sha256
    assert torch.equal(torch.get_rng_state(), state)


@every_selector
def test_bytes_are_those_of_any_selector(name: str) -> None:
    """Equal in total, also where layers differ; and no view keeps the whole prompt alive."""
    for entries, m in SIZES:
        cache = kept_by(name, entries, m)
        recent = evict(prompt_of(name, entries).layers, Recent(), cache.kept_entries)
        for measure in ("payload_bytes", "index_bytes", "metadata_bytes"):
            assert getattr(cache, measure) == getattr(recent, measure)
        assert cache.payload_bytes == 2 * LAYERS * KV_HEADS * cache.kept_entries * SIZE * 4
        parts = [part for layer in cache.layers for part in (layer.key, layer.value)]
        assert name == "full" or all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


@every_selector
def test_a_whole_prompt_is_kept_whole(name: str) -> None:
    """m >= n: everything in order, bitwise, whatever the scores and however short the prompt; nothing is asked for."""
    selector = build_selector(name, {})
    for entries in (1, 3, 63, 100):
        prompt = Prompt(random_model("llama", layers=LAYERS), random_document("short", entries).tokens, window=0)
        assert Action(name, name, selector, Retention(512)).kept_entries(entries, "here") == entries
        cache = evict(prompt.layers, selector, entries)
        for layer, left, index in zip(prompt.layers, cache.layers, cache.indices, strict=True):
            assert index.tolist() == [list(range(entries))] * KV_HEADS
            assert torch.equal(layer.key, left.key)
            assert torch.equal(layer.value, left.value)


@every_selector
def test_the_first_token_is_the_same(name: str) -> None:
    """Its law is computed before eviction: no distance at t = 1, and the control's tokens."""
    keep = Retention(None if name == "full" else 80)
    actions = [Action("some", name, build_selector(name, {}), keep), Action("full", "full", SELECTORS["full"](), Retention(None))]  # fmt: skip
    model, document = random_model("qwen2", layers=LAYERS), random_document("first", 150)
    some, full = generate_units(model, "study", document, [PendingUnit(action, 0, 8) for action in actions], 3, 7)
    steps, control = ([row for row in unit.events.to_pylist() if row["t"] == 1] for unit in (some, full))
    assert [row["x_token"] for row in steps] == [row["y_token"] for row in steps]
    assert [row["x_token"] for row in steps] == [row["x_token"] for row in control]
    assert {row["delta"] for row in steps} == {row["f"] for row in steps} == {0.0}
    assert any(row["delta"] > 0 for row in some.events.to_pylist()) == (name != "full")


@dataclass(frozen=True)
class WholeChunk:
    """Keeps the chunk as it comes."""

    def update(self, gathered: QueryChunk | None, chunk: QueryChunk) -> QueryChunk:
        """The chunk."""
        assert gathered is None
        return chunk


@cache
def whole_chunks(entries: int) -> tuple[tuple[PromptLayer, QueryChunk], ...]:
    """A prompt's layers, and all queries of each in one chunk."""
    model, tokens = random_model("qwen2", layers=LAYERS), random_document("chunks", entries).tokens
    layers = Prompt(model, tokens, 128, [WholeChunk()]).layers
    return tuple((layer, layer.gathered(WholeChunk())) for layer in layers)


@every_selector
def test_queries_may_come_in_chunks(name: str) -> None:
    """Sums over chunks differ from those over the whole in the last digits of float64: the sets are the same."""
    selector, entries = build_selector(name, {}), 401
    for layer, whole in whole_chunks(entries):
        sets = []
        for ends in ([entries], [1, 2, 130, 400, entries]):
            gathered: dict[Any, Any] = {}
            for first, last in zip([0, *ends], ends, strict=False):
                part = replace(
                    whole, query=whole.query[:, first:last], key=whole.key[:, :last], value=whole.value[:, :last],
                    hidden=whole.hidden[first:last], cos=whole.cos[first:last], sin=whole.sin[first:last],
                )  # fmt: skip
                assert part.first == first
                for statistic in selector.statistics:
                    gathered[statistic] = statistic.update(gathered.get(statistic), part)
            seen = replace(layer, statistics=gathered)
            sets.append(selector.keep(seen, entries if name == "full" else 133).tolist())
        assert sets[0] == sets[1]


@every_selector
def test_every_parameter_is_part_of_the_identity(name: str) -> None:
    """Two actions that differ in one parameter have different rows in the ``actions`` table."""
    keep = "all" if name == "full" else "1/2"
    action = build_action(ActionSection(name="some", selector=name, keep=keep))
    selector = action.selector
    assert isinstance(selector, Selector)
    assert selector.summary
    row = action.row("study", prespecified=True)
    assert (row["selector"], row["keep"]) == (name, keep)
    assert (row["window"], row["sinks"]) == (selector.window, selector.sinks)
    assert selector == build_selector(name, {})
    assert hash(selector) == hash(build_selector(name, {}))
    rows = {json.dumps(row)}
    changed = {key: value for key, value in options_of(selector).items() if not isinstance(value, str)}
    for key, value in changed.items():
        other = not value if isinstance(value, bool) else 2 if value is None else value + 2
        section = ActionSection(name="some", selector=name, keep=keep, **{key: other})
        rows.add(json.dumps(build_action(section).row("study", prespecified=True)))
    assert len(rows) == 1 + len(changed)


def options_of(selector: Selector) -> dict[str, Any]:
    """What a study may set."""
    own = {field.name: getattr(selector, field.name) for field in fields(selector)}  # type: ignore[arg-type]
    return dict([*own["options"], *own["inner_options"]]) if "options" in own else own
