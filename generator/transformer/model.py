"""A transformer as the model of a study."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvdrift.generator.actions import Action
from kvdrift.generator.identity import ActionIdentity, ModelIdentity
from kvdrift.generator.transformer.decoder import Decoder, check_prompt, is_small
from kvdrift.generator.transformer.prompts.document import PrefilledPrompt
from kvdrift.schema.document import Document

_UNKNOWN = ModelIdentity(None, None)
_PAIRS_AT_ONCE = 96  # with more, what a position computes leaves a core's cache


@dataclass(frozen=True)
class LoadedModel(Decoder):
    """``kvdrift.generator.generation.model.Model`` of a transformer.

    ``files`` are fingerprints of the files that it was loaded from, and ``stored_bytes`` those of its weight files;
    they are unknown if it was made in memory.
    """

    files: ModelIdentity = _UNKNOWN
    stored_bytes: int | None = None

    @property
    def models(self) -> list[LoadedModel]:
        """A list with the model itself."""
        return [self]

    def ending(self, eos_tokens: tuple[int, ...]) -> LoadedModel:
        """Return the same model with other tokens that end a text."""
        return replace(self, eos_tokens=eos_tokens)

    @property
    def pairs_at_once(self) -> int:
        """Documents are decoded side by side up to this number of pairs, to keep a CPU busy."""
        busy = (
            self.threads != 1 or not is_small(self.network) or self.device != "cpu"
        )  # what a large model or a GPU computes takes the time
        alone = busy or self.batch_deviation or self.switch is not None  # all rows of a step have RoPE's frequencies
        return 0 if alone else _PAIRS_AT_ONCE

    def twins(self, count: int, before: Callable[[], None]) -> Iterator[LoadedModel]:
        """Make the model ``count`` times for as many threads, each with its share of the available memory.

        Each has modules of its own over the same weights, so that hooks and state belong to one thread. ``before`` is
        called before every pass through the network; an error that it raises ends the pass.
        """
        for _ in range(count):
            network = copy.deepcopy(self.network, {id(weight): weight for weight in self.network.parameters()})
            yield replace(self, network=network, memory_share=self.memory_share / count, before_pass=before)

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units."""
        return replace(self.files, eos_tokens=self.eos_tokens).of(action.parts)

    def weight_bytes(self, action: Action) -> int | None:  # noqa: ARG002 - all actions have its weights
        """Return the bytes of the weight files of an action's side."""
        return self.stored_bytes

    def prefill(
        self, document: Document, actions: Sequence[Action], horizon: int, sharing: int | None = None
    ) -> PrefilledPrompt:
        """Process the document's prompt, recording the data that the selectors of ``actions`` need.

        ``sharing`` is the number of actions that share the prefill's time, if not ``actions`` alone.
        """
        check_prompt(document, horizon, self.positions, self.shape.vocabulary, self.switch)
        return PrefilledPrompt(self, document, actions, horizon, sharing)
