"""The checks of selectors, on prompts of random tokens under small models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import torch

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.recording import PromptLayer, QueryChunk
from kvdrift.generator.checks.random_models import embedded_document, random_document, random_model
from kvdrift.generator.checks.trial import Check, Trial, common_checks, require, require_no_draws, same_events
from kvdrift.generator.selectors import (
    SELECTOR_KIND,
    SELECTORS,
    Full,
    Recent,
    Selector,
    build_selector,
    default_parameters,
)
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID
from kvdrift.generator.transformer.loading import load_model
from kvdrift.generator.transformer.prompts.eviction import CompactCache, evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection

_LAYERS = 3

# Prompt and kept entries: one chunk and two of 1,024, one below the 260 that LagKV needs to score, one nearly whole.
_SIZES = ((401, 133), (1100, 550), (200, 99), (150, 149))
_IN_TURN = (300, 120)  # of prompts that follow each other; no other prompt is as long
_LEAST_KEPT = 80  # of prompts with sizes as above, which are longer for selectors that need more
_ROOM = 900  # what window and sinks can need: the longest prompt is then as long as the models' positions


@dataclass(frozen=True)
class _Model:
    """A kind of random-weight model with 4 query heads."""

    architecture: str = "llama"
    dtype: str = "float32"
    kv_heads: int = 2

    def __str__(self) -> str:
        return f"{self.architecture}, {self.dtype}, 4 query heads on {self.kv_heads} KV heads"

    def prompt(self, name: str, entries: int, selector: Selector) -> Prompt:
        """Return a prompt with the records that a selector needs."""
        model = random_model(self.architecture, self.dtype, _LAYERS, self.kv_heads)
        return Prompt(model, random_document(name, entries).tokens, selector.window, selector.statistics)


_USUAL = _Model()
_OTHERS = (
    _Model(kv_heads=1),
    _Model(kv_heads=4),
    _Model("qwen2", "bfloat16"),
    _Model("qwen2", "float16"),
)


@dataclass(frozen=True, eq=False)
class SelectorTrial(Trial[Selector]):
    """A selector to check."""

    kind: ClassVar = SELECTOR_KIND
    decides: ClassVar[str] = "kept sets"
    _prompts: dict[tuple[_Model, int], Prompt] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._needed > _ROOM:
            raise InputError(
                f"window ({self.part.window}) and sinks ({self.part.sinks}) are together more than the {_ROOM} entries "
                "that the checks have prompts for; make them smaller with --parameter"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The parameters that a study can set, with their values; of a selector of kvpress, its presses' options."""
        settings = {name: getattr(self.part, name) for name in default_parameters(type(self.part))}
        return dict([*settings["options"], *settings["inner_options"]]) if "options" in settings else settings

    @property
    def whole(self) -> bool:
        """Whether the selector keeps everything."""
        return isinstance(self.part, Full)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Pairs of prompt entries n and kept entries m, large enough for window and sinks."""
        return [self._grown(*size) for size in _SIZES]

    @property
    def _needed(self) -> int:
        return self.part.window + self.part.sinks

    def _grown(self, entries: int, kept: int) -> tuple[int, int]:
        extra = max(0, self._needed + 16 - _LEAST_KEPT)
        return entries + extra, (entries if self.whole else kept) + extra

    def action(self, name: str = "own", **changes: Any) -> Action:
        """Return an action of the selector at half of the entries; ``changes`` are new values of its parameters."""
        keep = "all" if issubclass(SELECTORS.get(self.name, Selector), Full) else "1/2"
        parameters: dict[str, Any] = {**self.parameters, **changes}
        return build_action(ActionSection(name=name, selector=self.name, keep=keep, **parameters), self.folder)

    def prompt(self, model: _Model, entries: int) -> Prompt:
        """Return a prompt of random tokens under a random-weight model, with the records that the selector needs."""
        if (model, entries) not in self._prompts:
            self._prompts[model, entries] = model.prompt(f"matrix-{entries}", entries, self.part)
        return self._prompts[model, entries]

    def evicted(self, entries: int, kept: int) -> CompactCache:
        """Return the cache that the selector leaves of a prompt of n = ``entries`` entries at m = ``kept``."""
        return evict(self.prompt(_USUAL, entries).layers, self.part, kept)

    def decided(self) -> dict[str, str]:
        """Return digests of kept positions for each pair of ``sizes``, keyed by text such as "n = 401, m = 133"."""
        return {f"n = {n}, m = {m}": " ".join(self.evicted(n, m).kept_sha256) for n, m in self.sizes}

    def decided_on(self, prompt: str) -> str:
        """Return digests of the positions kept of one more prompt, whose random tokens ``prompt`` seeds."""
        entries, kept = self._grown(*_IN_TURN)
        return " ".join(evict(_USUAL.prompt(prompt, entries, self.part).layers, self.part, kept).kept_sha256)


def _kept_sets(trial: SelectorTrial) -> str:
    for model in (_USUAL, _Model("qwen2")):
        for entries, kept in trial.sizes:
            _check_sets(trial, model, entries, kept)
    entries, kept = trial.sizes[0]
    budgets = [*trial.part.budgets(kept, entries, _LAYERS)]
    return f"{_count(trial)}, in order, window and sinks among them; budgets such as {budgets}"


def _other_models(trial: SelectorTrial) -> str:
    for model in _OTHERS:
        _check_sets(trial, model, *trial.sizes[2])
    return _count(trial)


def _count(trial: SelectorTrial) -> str:
    entries, kept = trial.sizes[0]
    least = trial.part.least_of_head(kept)
    if least == kept:
        return "each head keeps exactly m"
    lengths = [(index < entries).sum(1).tolist() for index in trial.evicted(entries, kept).indices]
    return f"the heads of a layer keep m on average, such as {lengths} for m = {kept}, and each at least {least}"


def _check_sets(trial: SelectorTrial, model: _Model, entries: int, kept: int) -> None:
    """Check the positions that each head keeps; ``evict`` itself checks their number, their order and their range."""
    selector, where = trial.part, f"n = {entries}, m = {kept} ({model})"
    prompt = trial.prompt(model, entries).layers
    budgets = selector.budgets(kept, entries, _LAYERS)
    require(
        sum(budgets) == kept * _LAYERS, f"{where}: budgets {[*budgets]} do not sum to m x layers = {kept} x {_LAYERS}"
    )
    before = [(layer.key.clone(), layer.value.clone()) for layer in prompt]
    cache = evict(prompt, selector, kept)
    promised = {*range(entries - selector.window, entries), *range(selector.sinks)}
    for number, (layer, (key, value), index) in enumerate(zip(prompt, before, cache.indices, strict=True)):
        unchanged = torch.equal(layer.key, key) and torch.equal(layer.value, value)
        require(unchanged, f"{where}, layer {number}: keys or values were changed in place; clone them first")
        for head, chosen in enumerate(index.tolist()):
            lost = len(promised - set(chosen))
            require(
                not lost, f"{where}, layer {number}, head {head}: {lost} positions of window and sinks are not kept"
            )


def _repetition(trial: SelectorTrial) -> str:
    entries, kept = trial.sizes[0]
    torch.manual_seed(1)
    first = trial.evicted(entries, kept)
    torch.manual_seed(2)
    state, again = torch.get_rng_state(), trial.prompt(_USUAL, entries).layers
    second = evict(again, trial.part, kept)
    require(second.kept_sha256 == first.kept_sha256, "a second choice from the same prompt keeps other positions")
    twin = evict(again, trial.action().selector, kept)
    require(twin.kept_sha256 == first.kept_sha256, "an equal selector keeps other positions of the same prompt")
    require_no_draws(state)
    return "the same sets, and no draw from torch's state"


def _other_actions(trial: SelectorTrial) -> str:
    entries, kept = trial.sizes[0]
    statistics = (*build_selector("h2o", {}).statistics, *trial.part.statistics)
    tokens, window = random_document(f"matrix-{entries}", entries).tokens, max(128, trial.part.window + 1)
    beside = Prompt(random_model("llama", "float32", _LAYERS), tokens, window, statistics)
    same = evict(beside.layers, trial.part, kept).kept_sha256 == trial.evicted(entries, kept).kept_sha256
    require(same, "other positions are kept if the prompt has queries and statistics for other selectors, too")
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
    model, tokens = random_model("qwen2", "float32", _LAYERS), random_document("chunks", entries).tokens
    return tuple(
        (layer, layer.gathered(WholeChunk())) for layer in Prompt(model, tokens, entries, [WholeChunk()]).layers
    )


def _chunks(trial: SelectorTrial) -> str:
    entries, kept = trial.sizes[0]
    for layer, whole in _whole_chunks(entries):
        once, parts = (
            trial.part.keep(_in_chunks(trial.part, layer, whole, ends), kept).tolist()
            for ends in ([entries], [1, 2, 130, 400, entries])
        )
        line = f"layer {layer.number}: other positions are kept if queries come in 5 chunks and not in one"
        require(once == parts, f"{line}; sum in float64, or avoid ties of scores")
    return "the same sets"


def _in_chunks(selector: Selector, layer: PromptLayer, chunk: QueryChunk, ends: list[int]) -> PromptLayer:
    """Return ``layer`` with statistics gathered in chunks that end at ``ends``; ``chunk`` has all of its queries."""
    gathered: dict[Any, Any] = {}
    for first, last in zip([0, *ends], ends, strict=False):
        part = replace(
            chunk, query=chunk.query[:, first:last], key=chunk.key[:, :last], value=chunk.value[:, :last],
            hidden=chunk.hidden[first:last], cos=chunk.cos[first:last], sin=chunk.sin[first:last],
        )  # fmt: skip
        for statistic in selector.statistics:
            gathered[statistic] = statistic.update(gathered.get(statistic), part)
    return replace(layer, statistics=gathered)


def _embedded_model(trial: SelectorTrial) -> str:
    document = embedded_document()
    needed = trial.part.window + trial.part.sinks + 16
    kept = Retention(None if trial.whole else max(document.prompt_tokens // 2, min(needed, document.prompt_tokens)))
    action, beside = replace(trial.action(), retention=kept), replace(trial.action("beside"), selector=Recent())
    return same_events(action, beside, load_model(EMBEDDED_ID), document)


SelectorTrial.checks = (
    Check("kept sets", "4 prompts of 150 to 1,100 tokens under llama and qwen2 (3 layers, 2 KV heads)", _kept_sets),
    Check("other models", "1 and 4 KV heads, bfloat16 and float16", _other_models),
    Check("repetition", "a second choice, and an equal selector's", _repetition),
    Check("other actions", "a prompt with queries and statistics that other selectors need, too", _other_actions),
    Check("chunks", "the prompt's queries in one chunk, and in 5", _chunks),
    *common_checks("prompts"),
    Check("embedded model", "2 pairs of 8 tokens after a needle prompt of 396", _embedded_model),
)
