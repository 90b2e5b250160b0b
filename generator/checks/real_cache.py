"""Compare a policy with a cache from which entries are really removed: transformers' own, with eager attention.

The attention of our step shows which entries it reads, by its effect on values. The real cache then holds exactly these
entries. Nothing is shared between streams, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.checks.random_models import save_random_model
from kvdrift.generator.checks.tried import require
from kvdrift.generator.coupling.streams import ALL_SAVINGS
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors.policies import Policy
from kvdrift.generator.selectors.policies.guarded import GuardedRule, rule_of
from kvdrift.generator.transformer.files.configuration import library, quiet
from kvdrift.generator.transformer.files.local_folders import model_source
from kvdrift.generator.transformer.model import LoadedModel
from kvdrift.schema.document import Document
from kvdrift.schema.errors import OperationError

Positions = list[list[list[int]]]
"""For each layer and KV head the positions that a step reads, ascending; the last position is that of the fed token."""

Law = NDArray[np.float64]

TOLERANCE = 1e-5  # float32 sums in another order: two ways to compute a law are some 1e-6 apart


@cache
def plain_network(model_id: str) -> Any:
    """Return transformers' own network of a model or architecture, in float32; one per process."""
    if ":" not in model_id:
        return _load(model_source(model_id))
    with TemporaryDirectory() as folder:
        return _load(save_random_model(Path(folder), model_id.partition(":")[2]))


def _load(source: Any) -> Any:
    with quiet():
        loader: Any = library().AutoModelForCausalLM
        return loader.from_pretrained(source, attn_implementation="eager", dtype=torch.float32).eval()


class RealStream:
    """One history in a cache of its own, from which entries are removed for each layer and KV head.

    Attributes:
        law: The law of the next token, float64 [V].
        positions: The positions that the cache holds.
    """

    def __init__(self, network: Any, tokens: Sequence[int]) -> None:
        self._network, self._cache = network, library().DynamicCache()
        self._next = 0
        self.law = self._fed(tokens)
        layers = self._cache.layers
        self.positions: Positions = [[[*range(len(tokens))] for _ in range(layer.keys.shape[1])] for layer in layers]

    def advance(self, token: int, read: Positions | None = None) -> None:
        """Feed a token, and keep only the entries of ``read``, by default all."""
        if read is not None:
            for number, layer in enumerate(self._cache.layers):
                places = [self._places(number, head, wanted[:-1]) for head, wanted in enumerate(read[number])]
                layer.keys, layer.values = (
                    torch.stack([part[0, head, own] for head, own in enumerate(places)])[None]
                    for part in (layer.keys, layer.values)
                )
                self.positions[number] = [wanted[:-1] for wanted in read[number]]
        for own in (own for layer_positions in self.positions for own in layer_positions):
            own.append(self._next)
        self.law = self._fed([token])

    def _places(self, layer: int, head: int, wanted: Sequence[int]) -> list[int]:
        place = {position: place for place, position in enumerate(self.positions[layer][head])}
        back = [position for position in wanted if position not in place]
        where = f"layer {layer}, head {head}, when position {self._next} is fed"
        require(not back, f"{where}: positions {back} are read again after they were dropped")
        return [place[position] for position in wanted]

    def _fed(self, tokens: Sequence[int]) -> Law:
        ids = torch.arange(self._next, self._next + len(tokens))[None]
        self._next += len(tokens)
        with torch.no_grad():
            output = self._network(torch.tensor([list(tokens)]), past_key_values=self._cache, position_ids=ids)
        logits = output.logits[0, -1].double().numpy()
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())


class WatchedStream:
    """One history of a policy's action, which records the entries that every step reads.

    ``law`` is that of the next token, float64 [V].
    """

    def __init__(self, model: LoadedModel, document: Document, action: Action, policy: Policy, horizon: int) -> None:
        self._model, self._entries, self._fed = model, document.prompt_tokens, 0
        self._watched = _Watched(policy)
        with model.computing():
            prepared = model.prefill(document, [replace(action, policy=self._watched)], horizon).evict()
            self._kernels = prepared.kernels(1, ALL_SAVINGS)
        self.law: Law = self._kernels.open([1])[0].double().cpu().numpy()

    def advance(self, token: int) -> Positions | None:
        """Feed a token and return the positions that the step has read; None if it has read everything."""
        self._watched.read.clear()
        self._fed += 1
        with self._model.computing():
            self.law = self._kernels.advance(torch.tensor([token]))[0].double().cpu().numpy()
        if not self._watched.kept:
            return None
        own = [*range(self._entries, self._entries + self._fed)]
        found: Positions = []
        for layer, kept in enumerate(self._watched.kept):
            held = [[*index, *own] for index in kept.tolist()]
            read = self._watched.read.get(layer, [range(len(positions)) for positions in held])
            found.append([[all_of_it[place] for place in some] for all_of_it, some in zip(held, read, strict=True)])
        heads = [head for layer_heads in found for head in layer_heads]
        where = f"step {self._fed}"
        require(all(head[-1:] == own[-1:] for head in heads), f"{where}: the entry of the token fed is not read")
        numbers = sorted({len(head) for head in heads})
        require(len(numbers) == 1, f"{where}: KV heads and layers read {numbers} entries, and bytes count one number")
        return found


class _Watched(Policy):
    """A policy that behaves like another policy and records which entries its streams read.

    Attributes:
        kept: For each layer the positions that the first cut kept; empty if nothing is ever dropped.
        read: For each layer in which the rule attended, the places of the entries that each head read in the last step.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.kept: Sequence[Tensor] = ()
        self.read: dict[int, Sequence[Sequence[int]]] = {}

    @property
    def least(self) -> int:
        """The smallest m of the other policy."""
        return self._policy.least

    @property
    def first_cut(self) -> Selector:
        """The first cut of the other policy."""
        return self._policy.first_cut

    def rule(self, prompt: Sequence[PromptLayer], kept: Sequence[Tensor], budget: int) -> CacheRule:
        """Return the other policy's rule, with recording."""
        self.kept = kept
        return _WatchedRule(self._policy, rule_of(self._policy, prompt, kept, budget), budget, self.read)


class _WatchedRule(GuardedRule):
    """A policy's rule that also records which entries it reads."""

    def __init__(self, policy: Policy, rule: CacheRule, budget: int, read: dict[int, Sequence[Sequence[int]]]) -> None:
        super().__init__(policy, rule, budget)
        self._read = read

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Attend, and record which entries the first row reads."""
        if self.replaces(entries.suffix_key.shape[2]):
            self._read[entries.layer] = self._places(entries, scores)
        return super().attend(entries, scores)

    def _places(self, entries: StreamEntries, scores: Tensor) -> Sequence[Sequence[int]]:
        """Return the places that are read: zero queries weigh read entries equally, and one-hot values show them."""
        prompt, size = entries.prompt_key.shape[1], entries.query.shape[-1]
        count = prompt + entries.suffix_key.shape[2]
        told = torch.eye(count, device=entries.query.device, dtype=entries.query.dtype)
        told = torch.nn.functional.pad(told, (0, -count % size))
        shares = []
        for values in torch.split(told, size, 1):
            prompt_value = values[:prompt].expand_as(entries.prompt_value).contiguous()
            suffix_value = values[prompt:].expand_as(entries.suffix_value).contiguous()
            query = torch.zeros_like(entries.query)
            probe = replace(entries, query=query, prompt_value=prompt_value, suffix_value=suffix_value)
            found, _ = super().attend(probe, scores.clone())
            if found is not None:
                shares.append(found[0].float().amax(1))  # [KV heads, size]
        return [row.nonzero().squeeze(-1).tolist() for row in torch.cat(shares, -1)[:, :count]]


class RealSide:
    """The compressed side of one history, in a real cache from which the policy's unread entries are removed.

    ``reads`` is the number of entries that the last step has read.
    """

    def __init__(
        self, network: Any, model: LoadedModel, document: Document, action: Action, policy: Policy, horizon: int
    ) -> None:
        self._watched = WatchedStream(model, document, action, policy, horizon)
        self._real = RealStream(network, document.tokens)
        self.reads = 0

    @property
    def law(self) -> Law:
        """The law of the next token, by the real cache."""
        return self._real.law

    def advance(self, token: int) -> None:
        """Feed a token to both caches, and raise an error if their laws differ."""
        self._real.advance(token, self._watched.advance(token))
        self.reads = len(self._real.positions[0][0])
        apart = float(np.abs(self._watched.law - self._real.law).sum()) / 2
        if apart >= TOLERANCE:
            raise OperationError(f"with {self.reads} entries read, the law is {apart:.1e} from that of a real cache")
