"""A reference and actions with weights of their own, as the model of a study.

Each model prefills a document's prompt by itself, and its actions' caches are made from its results. So
distributions may differ from the first position on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.streams import SharingOptions, StreamDecoder
from kvdrift.generator.identity import ActionIdentity
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.loading import LoadedModel, load_model
from kvdrift.generator.transformer.memory import available_bytes, replicates_within
from kvdrift.generator.transformer.other_weights.named import (
    check_shared,
    naming_action,
    weights_location,
    with_own_weights,
    with_weights,
)
from kvdrift.generator.transformer.prompts.document import PreparedPrompt
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.document import Document
from kvdrift.schema.progress import SILENT
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.study import Study

_NONE = torch.empty(0, dtype=torch.int64)


class JointStreams(StreamDecoder):
    """Streams that several models decode: ``parts`` are their decoders, on one device and of one vocabulary.

    Open streams are numbered over all parts; a part has its own in the same order. Parked streams have the same places
    in their parts.
    ``caches`` has for each cache the part that decodes it and the cache's number there, ascending within a part.
    """

    def __init__(self, parts: Sequence[StreamDecoder], caches: Sequence[tuple[int, int]]) -> None:
        super().__init__(parts[0].eos_tokens, parts[0].device)  # the reference's
        self._parts, self._caches = parts, caches
        self._owner = _NONE  # the part of each open stream, int64 [streams]
        self._rows: list[Tensor] = [_NONE] * len(parts)  # of each part, its open streams, ascending
        self._parked = _NONE  # the part of each parked stream, int64 [places]

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start streams; every model has prefilled the prompt, so distributions of position 1 may differ."""
        self.rewind()
        self._assign(torch.tensor([self._caches[cache][0] for cache in caches], dtype=torch.int64))
        numbers = [self._caches[cache][1] for cache in caches]
        return self._distributions(lambda part, rows: part.open([numbers[row] for row in rows.tolist()]))

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, and return the next distributions, [streams, V]."""
        for part, rows in zip(self._parts, self._rows, strict=True):
            if not len(rows):
                part.advance(_NONE)  # only the position advances
        return self._distributions(lambda part, rows: part.advance(tokens[rows]))

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues stream ``rows[i]``, open or parked."""
        streams = len(self._owner)
        within = torch.empty_like(self._owner)  # each stream's row in its own part
        for part_rows in self._rows:
            within[part_rows] = torch.arange(len(part_rows))
        parked = rows >= streams
        open_rows, places = rows[~parked], rows[parked] - streams
        owner, row = torch.empty_like(rows), torch.empty_like(rows)
        owner[~parked], row[~parked] = self._owner[open_rows], within[open_rows]
        counts = torch.tensor([len(part_rows) for part_rows in self._rows])
        owner[parked] = self._parked[places]
        row[parked] = counts[owner[parked]] + places
        self._assign(owner)
        for part, part_rows in zip(self._parts, self._rows, strict=True):
            part.select(row[part_rows])

    @property
    def cuts_back(self) -> bool:
        """Whether each model's parked streams can be continued from positions before the one where they were parked."""
        return all(part.cuts_back for part in self._parts)

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams ``rows`` as the parked streams ``places``."""
        more = int(places.max()) + 1 - len(self._parked)
        self._parked = torch.cat([self._parked, torch.zeros(max(more, 0), dtype=torch.int64)])
        self._parked[places] = self._owner[rows]
        for number, (part, part_rows) in enumerate(zip(self._parts, self._rows, strict=True)):
            mine = self._owner[rows] == number
            if mine.any():
                part.park(torch.searchsorted(part_rows, rows[mine]), places[mine])

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
        self._assign(_NONE)
        for part in self._parts:
            part.rewind()

    def _assign(self, owner: Tensor) -> None:
        """Assign open stream i to part ``owner[i]``."""
        self._owner = owner
        self._rows = [(owner == number).nonzero().squeeze(-1) for number in range(len(self._parts))]

    def _distributions(self, of_part: Callable[[StreamDecoder, Tensor], Tensor]) -> Tensor:
        """Return the distributions of the open streams, [streams, V].

        ``of_part`` returns those of a part, given the part and the numbers of its open streams.
        """
        part_results = [
            (rows, of_part(part, rows)) for part, rows in zip(self._parts, self._rows, strict=True) if len(rows)
        ]
        if len(part_results) == 1:
            return part_results[0][1]
        if not part_results:
            return torch.empty((0, 0), dtype=torch.float64, device=self.device)
        distributions = part_results[0][1].new_empty((len(self._owner), part_results[0][1].shape[1]))
        for rows, part_result in part_results:
            distributions[rows.to(distributions.device)] = part_result
        return distributions


@dataclass(frozen=True)
class ModelWithOthers(LoadedModel):
    """The reference's model, of a study in which actions have weights of their own.

    ``others`` are the models of these actions, by an action's name; several actions may share one. Sampling and end
    tokens are the reference's on both sides.
    """

    others: Mapping[str, LoadedModel] = field(default_factory=dict)

    @classmethod
    def of(cls, reference: LoadedModel, others: Mapping[str, LoadedModel]) -> Self:
        """Return the reference's model with those of actions; it has the threads and positions that suit all."""
        models = (reference, *others.values())
        threads = [model.threads for model in models if model.threads is not None]
        most = max(threads) if len(threads) == len(models) else None
        positions = min(model.positions for model in models)
        return cls(**vars(reference) | {"others": others, "threads": most, "positions": positions})

    @property
    def models(self) -> list[LoadedModel]:
        """All models, the reference's first, each once."""
        return [self, *{id(one): one for one in self.others.values() if one.network is not self.network}.values()]

    @property
    def most_threads(self) -> int:
        """The most threads that compute on a CPU; 1 if more gave other results of any model."""
        alone = any(model.steps.alone for model in self.others.values())
        return 1 if alone else super().most_threads

    @property
    def batch_deviation(self) -> float:
        """The largest ``batch_deviation`` of all models."""
        return max(super().batch_deviation, *(model.batch_deviation for model in self.others.values()))

    @property
    def pairs_at_once(self) -> int:
        """The most pairs (action, replicate) of documents decoded side by side: the smallest such limit of a model."""
        return min(super().pairs_at_once, *(model.pairs_at_once for model in self.others.values()))

    def twins(self, count: int, before: Callable[[], None]) -> Iterator[Self]:
        """Yield ``count`` copies of all models, over the same weights, for as many threads."""
        others = {id(model): model for model in self.others.values()}
        twins = super().twins(count, before), *(model.twins(count, before) for model in others.values())
        for own, *of_others in zip(*twins, strict=True):
            of = dict(zip(others, of_others, strict=True))
            yield replace(own, others={name: of[id(model)] for name, model in self.others.items()})

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units: the reference's weights, the action's weights, and its parts."""
        identity, other = super().identity(action), self.others.get(action.name)
        return identity if other is None else with_weights(identity, other.files.weights_sha256)

    def weight_bytes(self, action: Action) -> int | None:
        """Return the bytes of the weight files of the model that decodes an action; None if they are unknown."""
        return self.others.get(action.name, self).stored_bytes

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedSides:  # type: ignore[override]
        """Prefill the document's prompt by the reference's model and by every model of ``actions``; make all caches."""
        sides = list({id(model): model for model in self.others.values()}.values())
        numbers = {id(model): 1 + place for place, model in enumerate(sides)}
        places: list[tuple[int, int]] = []
        side_actions: list[list[Action]] = [[] for _ in range(1 + len(sides))]
        for action in actions:
            side = numbers[id(self.others[action.name])] if action.name in self.others else 0
            side_actions[side].append(action)
            places.append((side, len(side_actions[side])))
        prompts = {0: super().prepare(document, side_actions[0], horizon, len(actions))}
        for side, (model, its_actions) in enumerate(zip(sides, side_actions[1:], strict=True), start=1):
            if its_actions:
                prompts[side] = replace(model, sampling=self.sampling).prepare(document, its_actions, horizon)
        return PreparedSides(self, prompts, places)


@dataclass(frozen=True)
class PreparedSides:
    """``PreparedDocument`` of several models: ``prompts`` has, by side, the prompt and the caches of its actions.

    Side 0 is the reference's. ``places`` has for each action its side and its number there, from 1.
    """

    reference: LoadedModel
    prompts: Mapping[int, PreparedPrompt]
    places: Sequence[tuple[int, int]]

    def kernels(
        self, streams: int, sharing: SharingOptions, beside: Sequence[PreparedSides] = (), parked: int = 0
    ) -> StreamDecoder:
        """Return a decoder for this document and those ``beside`` it.

        Each side has room for ``streams`` open and ``parked`` parked streams.
        """
        documents = (self, *beside)
        sides = sorted({side for document in documents for side in document.prompts})
        caches: list[tuple[int, int]] = []
        counted = dict.fromkeys(sides, 0)  # caches of each side up to the present document
        for document in documents:
            caches += [(sides.index(side), counted[side] + number) for side, number in ((0, 0), *document.places)]
            for side in document.prompts:
                counted[side] += 1 + sum(action_side == side for action_side, _ in document.places)
        parts = []
        for side in sides:
            first, *others = [document.prompts[side] for document in documents if side in document.prompts]
            parts.append(first.kernels(streams, sharing, others, parked))
        return JointStreams(parts, caches)

    def under(self, sampling: Sampling) -> PreparedSides:
        """Return the same caches, with other sampling."""
        return replace(self, prompts={side: prompt.under(sampling) for side, prompt in self.prompts.items()})

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """Return how many replicates of each action fit into the memory that is left now; at least 1.

        ``actions`` is the number of actions of all documents side by side. A side's share of them is
        taken to be its share of this document's actions.
        """
        needed = 0
        for side, prompt in self.prompts.items():
            actions_of_side = sum(place == side for place, _ in self.places)
            needed += prompt.replicate_bytes(-(-actions * actions_of_side // len(self.places)), estimator)
        available = available_bytes(self.reference.device)
        return replicates_within(int(self.reference.memory_share * available), needed)

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """Return the columns of ``units`` about cache ``number``, counted from 1."""
        side, place = self.places[number - 1]
        record = self.prompts[side].record(place, streams)
        if side:
            record["prefill_seconds"] += self.prompts[0].seconds / len(self.places)
        return record

    def kept(self, number: int) -> tuple[KeptEntries, ...]:
        """Return the prompt entries that a cache has right after prefill, and after steps of a policy.

        Caches of actions are numbered from 1.
        """
        side, place = self.places[number - 1]
        return self.prompts[side].kept(place)


def load_transformer(study: Study, say: Callable[[str], None] = SILENT.say) -> LoadedModel:
    """Load the models of a study file's ``[model]`` and ``[[actions]]``; weights at one place are loaded once.

    ``say`` receives lines about the proofs of models that are not small.
    """
    section = study.model
    load = partial(
        load_model, device=section.device, dtype=section.dtype, device_map=section.device_map,
        logits_dtype=section.logits_dtype, say=say,
    )  # fmt: skip
    reference = load(model_location(section), name=section.id, revision=section.revision)
    custom = with_own_weights(study)
    if not custom:
        return reference
    loaded: dict[str, LoadedModel] = {} if section.revision else {model_location(section): reference}
    others: dict[str, LoadedModel] = {}
    for action in custom:
        location = weights_location(study, action)
        if location not in loaded:
            with naming_action(action, location):
                loaded[location] = load(location)
        others[action.name] = loaded[location]
    check_shared(study, fetch=True)
    return ModelWithOthers.of(replace(reference, sampling=study.sampling), others)
