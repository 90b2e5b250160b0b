"""The checks of selectors: each tries a selector, and returns a line about the result or raises an error."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.statistics import QueryChunk
from kvdrift.generator.checks.elsewhere import ELSEWHERE, IN_TURN, same_after_others, same_elsewhere
from kvdrift.generator.checks.random_models import embedded_document, random_document, same_events
from kvdrift.generator.checks.subject import KV_HEADS, LAYERS, SIZE, Kind, Subject, model_of
from kvdrift.generator.checks.tried import Check, first_token_found, require, require_unmoved
from kvdrift.generator.selectors import Recent, Selector, build_selector
from kvdrift.generator.transformer.prompts.eviction import CompactCache, evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.retention import Retention
from kvdrift.schema.tables import ACTIONS

# --- Kept sets -------------------------------------------------------------------------------------------------------


def _kept_sets(subject: Subject) -> str:
    for kind in (Kind("llama"), Kind("qwen2")):
        for entries, kept in subject.sizes:
            _check_sets(subject, kind, entries, kept)
    budgets = subject.selector.budgets(subject.sizes[0][1], subject.sizes[0][0], LAYERS)
    return f"each head keeps exactly m, in order, window and sinks among them; budgets such as {list(budgets)}"


def _head_groups(subject: Subject) -> str:
    entries, kept = subject.sizes[2]
    for kv_heads in (1, 4):
        _check_sets(subject, Kind("llama", kv_heads=kv_heads), entries, kept)
    return "each head keeps exactly m"


def _half_precision(subject: Subject) -> str:
    entries, kept = subject.sizes[0]
    for dtype in ("bfloat16", "float16"):
        cache = _check_sets(subject, Kind("qwen2", dtype), entries, kept)
        require(str(cache.layers[0].key.dtype) == f"torch.{dtype}", f"kept keys are {cache.layers[0].key.dtype}")
    return "each head keeps exactly m, in the model's dtype"


def _check_sets(subject: Subject, kind: Kind, entries: int, kept: int) -> CompactCache:
    """Check every head's kept positions, and the entries gathered at these positions."""
    selector, where = subject.selector, f"n = {entries}, m = {kept} ({kind})"
    prompt = subject.prompt(kind, entries).layers
    budgets = list(selector.budgets(kept, entries, LAYERS))
    require(sum(budgets) == kept * LAYERS, f"{where}: budgets {budgets} of {LAYERS} layers do not sum to m x layers")
    before = [(layer.key.clone(), layer.value.clone()) for layer in prompt]
    cache = evict(prompt, selector, kept)
    for layer, (key, value) in zip(prompt, before, strict=True):
        unchanged = torch.equal(layer.key, key) and torch.equal(layer.value, value)
        require(unchanged, f"{where}, layer {layer.number}: keys or values were changed in place; clone them first")
    require(cache.kept_entries == kept, f"{where}: {cache.kept_entries} entries are kept")
    require(cache.extents.tolist() == [[entries, budget] for budget in budgets], f"{where}: budgets are not kept")
    promised = {*range(entries - selector.window, entries), *range(selector.sinks)}
    for number, (layer, left, index) in enumerate(zip(prompt, cache.layers, cache.indices, strict=True)):
        shape = (kind.kv_heads, budgets[number])
        require(index.shape == shape, f"{where}, layer {number}: kept positions {tuple(index.shape)}, not {shape}")
        for head, chosen in enumerate(index.tolist()):
            here = f"{where}, layer {number}, head {head}"
            require(chosen == sorted(set(chosen)), f"{here}: positions are repeated or not in order")
            require(set(chosen) <= set(range(entries)), f"{here}: positions outside of the prompt")
            require(promised <= set(chosen), f"{here}: {len(promised - set(chosen))} of window and sinks are not kept")
            equal = torch.equal(left.key[head], layer.key[head, chosen])
            require(equal and torch.equal(left.value[head], layer.value[head, chosen]), f"{here}: other entries")
    return cache


def _whole_prompts(subject: Subject) -> str:
    for entries in (1, 3, 63, 100):
        prompt = Prompt(model_of(Kind()), random_document("short", entries).tokens, window=0).layers
        count = replace(subject.action(), retention=Retention(512)).kept_entries(entries, "here")
        require(count == entries, f"n = {entries}: keep = 512 keeps {count}")
        cache = evict(prompt, subject.selector, entries)
        for layer, left, index in zip(prompt, cache.layers, cache.indices, strict=True):
            require(index.tolist() == [list(range(entries))] * KV_HEADS, f"n = {entries}: not every entry is kept")
            same = torch.equal(layer.key, left.key) and torch.equal(layer.value, left.value)
            require(same, f"n = {entries}: kept entries are not the prompt's bit for bit")
    return "everything is kept, bit for bit"


def _equal_bytes(subject: Subject) -> str:
    for entries, kept in subject.sizes:
        cache = subject.evicted(Kind(), entries, kept)
        recent = evict(subject.prompt(Kind(), entries).layers, Recent(), kept)
        for measure in ("payload_bytes", "index_bytes", "metadata_bytes"):
            own, others = getattr(cache, measure), getattr(recent, measure)
            require(own == others, f"n = {entries}, m = {kept}: {measure} {own}, and {others} of selector 'recent'")
        payload = 2 * LAYERS * KV_HEADS * kept * SIZE * 4
        require(cache.payload_bytes == payload, f"n = {entries}: payload of {cache.payload_bytes}, not {payload} bytes")
        parts = [part for layer in cache.layers for part in (layer.key, layer.value)]
        held = sum(part.untyped_storage().nbytes() for part in parts)
        require(subject.whole or held == payload, f"n = {entries}: {held} bytes are held for {payload} of payload")
    return "payload, index and metadata are equal"


# --- What the sets depend on -----------------------------------------------------------------------------------------


def _repetition(subject: Subject) -> str:
    entries, kept = subject.sizes[0]
    torch.manual_seed(1)
    first = subject.evicted(Kind(), entries, kept)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, twin = subject.prompt(Kind(), entries).layers, subject.action().selector
    require(evict(again, subject.selector, kept).kept_sha256 == first.kept_sha256, "a second choice is another one")
    require(evict(again, twin, kept).kept_sha256 == first.kept_sha256, "a twin with equal parameters chooses others")
    require(torch.equal(torch.get_rng_state(), state), "numbers are drawn from torch's own state; seed a generator")
    return "the same sets, and no draw from torch's state"


def _other_actions(subject: Subject) -> str:
    entries, kept = subject.sizes[0]
    asked = (*build_selector("h2o", {}).statistics, *subject.selector.statistics)
    window = max(128, subject.selector.window + 1)
    prompt = Prompt(model_of(Kind()), random_document(f"matrix-{entries}", entries).tokens, window, asked)
    beside = evict(prompt.layers, subject.selector, kept)
    require(beside.kept_sha256 == subject.evicted(Kind(), entries, kept).kept_sha256, "the sets are others")
    return "the same sets"


@dataclass(frozen=True)
class WholeChunk:
    """A statistic that returns its chunk, which must be the only chunk."""

    def update(self, gathered: QueryChunk | None, chunk: QueryChunk) -> QueryChunk:
        """Return the chunk."""
        require(gathered is None, "the prompt has more than one chunk")
        return chunk


@cache
def _whole_chunks(entries: int) -> tuple[tuple[PromptLayer, QueryChunk], ...]:
    """Return a prompt's layers, and all queries of each layer in one chunk."""
    document = random_document("chunks", entries)
    layers = Prompt(model_of(Kind("qwen2")), document.tokens, entries, [WholeChunk()]).layers
    return tuple((layer, layer.gathered(WholeChunk())) for layer in layers)


def _chunks(subject: Subject) -> str:
    entries, kept = subject.sizes[0]
    for layer, whole in _whole_chunks(entries):
        sets = [
            subject.selector.keep(subject.layers_in_chunks(layer, whole, ends), kept).tolist()
            for ends in ([entries], [1, 2, 130, 400, entries])
        ]
        require(
            sets[0] == sets[1], f"layer {layer.number}: the sets are others; sum in float64, or make no use of ties"
        )
    return "the same sets"


# --- Identity, and generated events ----------------------------------------------------------------------------------


def _identity(subject: Subject) -> str:
    action = subject.action()
    row, twin = action.row("study", prespecified=True), subject.action()
    require(set(row) == set(ACTIONS.columns), "identity() has other columns than Selector.identity()")
    promised = (subject.selector.window, subject.selector.sinks)
    require((row["window"], row["sinks"]) == promised, "identity() changes window or sinks")
    require(action == twin and hash(action.selector) == hash(twin.selector), "equal parameters make unequal selectors")
    rows, changed, skipped = {json.dumps(row)}, [], []
    for name, value in options_of(action.selector).items():
        if (other := subject.changed(name, value)) is None:
            skipped.append(name)
            continue
        changed.append(name)
        rows.add(json.dumps(other.row("study", prespecified=True)))
        require(len(rows) == 1 + len(changed), f"{name} is no part of identity(): two values have one row")
    left = f"; no other value tried of {', '.join(skipped)}" if skipped else ""
    return f"{', '.join(changed) or 'no parameter'}{left}"


def options_of(selector: Selector) -> dict[str, Any]:
    """Return the parameters that a study may set, with their values."""
    own = {field.name: getattr(selector, field.name) for field in fields(selector)}  # type: ignore[arg-type]  # a dataclass
    return dict([*own["options"], *own["inner_options"]]) if "options" in own else own


def _full_retention(subject: Subject) -> str:
    some, whole, control = subject.generated()
    for unit, name in ((whole, "the selector's own path"), (control, "the control")):
        require_unmoved(unit, name)
        require(unit.events["x_token"].equals(unit.events["y_token"]), f"{name}: the two sides differ")
    most = float(np.max(some.events["delta"].to_numpy()))
    if subject.whole:
        return "delta = f = 0 exactly"
    require(most > 0, "delta is 0 with entries evicted, too")
    return f"delta = f = 0 exactly; with entries evicted, delta up to {most:.2f}"


def _embedded_model(subject: Subject) -> str:
    document = embedded_document()
    half = document.prompt_tokens // 2
    promised = subject.selector.window + subject.selector.sinks
    kept = Retention(None if subject.whole else max(half, min(promised + 16, document.prompt_tokens)))
    own, beside = replace(subject.action(), retention=kept), replace(subject.action("beside"), selector=Recent())
    return same_events(own, beside, document)


_SIZES = "4 prompts of 150 to 1,100 tokens"
CHECKS = (
    Check("kept sets", f"{_SIZES} under llama and qwen2 ({LAYERS} layers, {KV_HEADS} KV heads)", _kept_sets),
    Check("head groups", "1 and 4 KV heads for 4 query heads", _head_groups),
    Check("dtypes", "bfloat16 and float16", _half_precision),
    Check("whole prompts", "m above n, 1 to 100 tokens", _whole_prompts),
    Check("bytes", f"{_SIZES}, beside selector 'recent'", _equal_bytes),
    Check("repetition", "a second choice, and a twin's", _repetition),
    Check("other actions", "a prompt of which others ask for more", _other_actions),
    Check("other prompts", IN_TURN, same_after_others),
    Check("another process", ELSEWHERE, same_elsewhere),
    Check("chunks", "the prompt's queries at once, and in 5 chunks", _chunks),
    Check("identity", "each parameter changed", _identity),
    Check("first token", "8 pairs of continuations", first_token_found),
    Check("full retention", 'keep = "all" through the selector\'s action, 8 pairs', _full_retention),
    Check("embedded model", "2 pairs of 8 tokens after a needle prompt of 396", _embedded_model),
)
