"""The selector to check, and the prompts for its checks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.checks.tried import Tried
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import SELECTORS, Full, Selector
from kvdrift.generator.transformer.prompts.eviction import CompactCache, evict
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.log.store import Unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection

LAYERS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 16

# Prompt and kept entries: one chunk and two of 1,024, one below the 260 that LagKV needs to score, one nearly whole.
_SIZES = ((401, 133), (1100, 550), (200, 99), (150, 149))
_SHORT = (150, 80)
_IN_TURN = (300, 120)  # of prompts that follow each other; no other prompt is as long
_ROOM = 900  # what window and sinks can need: the longest prompt is then as long as the models' positions


@dataclass(frozen=True)
class Kind:
    """A kind of random-weight model."""

    architecture: str = "llama"
    dtype: str = "float32"
    kv_heads: int = KV_HEADS

    def __str__(self) -> str:
        return f"{self.architecture}, {self.dtype}, {HEADS} query heads on {self.kv_heads} KV heads"


@dataclass(frozen=True, eq=False)
class Subject(Tried[Selector]):
    """A selector to check."""

    kind: ClassVar[str] = "selector"
    decides: ClassVar[str] = "kept sets"
    _prompts: dict[tuple[Kind, int], Prompt] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._needed > _ROOM:
            raise InputError(
                f"window ({self.selector.window}) and sinks ({self.selector.sinks}) are more than the {_ROOM} that the "
                "checks have prompts for; make them smaller with --parameter"
            )

    @staticmethod
    def part_of(action: Action) -> Selector:
        """Return the action's selector."""
        return action.selector

    @property
    def selector(self) -> Selector:
        """The selector."""
        return self.part

    @property
    def whole(self) -> bool:
        """Whether the selector keeps everything."""
        return isinstance(self.selector, Full)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Pairs of prompt entries n and kept entries m, large enough for window and sinks."""
        sizes = [(entries + self._extra, kept + self._extra) for entries, kept in _SIZES]
        return [(entries, entries if self.whole else kept) for entries, kept in sizes]

    @property
    def _needed(self) -> int:
        return self.selector.window + self.selector.sinks

    @property
    def _extra(self) -> int:
        """The extra length of prompts, so that m can hold window and sinks and leaves a choice."""
        return max(0, self._needed + 16 - _SHORT[1])

    def action(self, name: str = "own", keep: str | None = None, **changes: Any) -> Action:
        """Return an action of the selector, by default at half of the entries, with some parameters changed."""
        keep = keep or ("all" if issubclass(SELECTORS.get(self.name, Selector), Full) else "1/2")
        parameters: dict[str, Any] = {**self.parameters, **changes}
        section = ActionSection(name=name, selector=self.name, keep=keep, **parameters)
        return build_action(section, self.folder)

    def prompt(self, kind: Kind, entries: int) -> Prompt:
        """Return a prompt of random tokens under a random-weight model, with the records that the selector needs."""
        if (kind, entries) not in self._prompts:
            tokens = random_document(f"matrix-{entries}", entries).tokens
            prompt = Prompt(model_of(kind), tokens, self.selector.window, self.selector.statistics)
            self._prompts[kind, entries] = prompt
        return self._prompts[kind, entries]

    def evicted(self, kind: Kind, entries: int, kept: int) -> CompactCache:
        """Return the cache of that prompt after the selector's cut."""
        return evict(self.prompt(kind, entries).layers, self.selector, kept)

    def decided(self) -> dict[str, str]:
        """Return digests of the kept positions, by prompt."""
        return {
            f"n = {entries}, m = {kept}": " ".join(self.evicted(Kind(), entries, kept).kept_sha256)
            for entries, kept in self.sizes
        }

    def decided_of(self, prompt: str) -> str:
        """Return a digest of the kept positions of one more prompt."""
        entries, kept = (size + self._extra for size in _IN_TURN)
        tokens = random_document(prompt, entries).tokens
        layers = Prompt(model_of(Kind()), tokens, self.selector.window, self.selector.statistics).layers
        return " ".join(evict(layers, self.selector, entries if self.whole else kept).kept_sha256)

    def layers_in_chunks(self, layer: PromptLayer, chunk: Any, ends: list[int]) -> PromptLayer:
        """Return a layer whose statistics were gathered in chunks with these ends; ``chunk`` has all queries."""
        gathered: dict[Any, Any] = {}
        for first, last in zip([0, *ends], ends, strict=False):
            part = replace(
                chunk, query=chunk.query[:, first:last], key=chunk.key[:, :last], value=chunk.value[:, :last],
                hidden=chunk.hidden[first:last], cos=chunk.cos[first:last], sin=chunk.sin[first:last],
            )  # fmt: skip
            for statistic in self.selector.statistics:
                gathered[statistic] = statistic.update(gathered.get(statistic), part)
        return replace(layer, statistics=gathered)

    def generate(self) -> list[Unit]:
        """Return units of one short prompt: of the selector, of the selector keeping everything, and of the control."""
        entries, kept = (size + self._extra for size in _SHORT)
        some = replace(self.action("some"), retention=Retention(None if self.whole else kept))
        actions = [some, replace(some, name="all", retention=Retention(None))]
        actions.append(Action("full", "full", Full(), Retention(None)))
        pending = [PendingUnit(action, 0, 8) for action in actions]
        model, document = model_of(Kind("qwen2")), random_document("first", entries)
        return generate_units(model, "study", document, pending, 3, 7)


def model_of(kind: Kind) -> Any:
    """Return the random-weight model of a kind."""
    return random_model(kind.architecture, kind.dtype, LAYERS, kind.kv_heads)
