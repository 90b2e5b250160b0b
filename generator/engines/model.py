"""An engine as the model of a study: the reference and each action is a side, with a cache of its own.

The reference's settings in a second cache (``kvdrift.generator.engines.again``) are the floor, which is treated like an
action. If the adapter promises that rows do not depend on other rows, the floor must be exactly 0.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.streams import Savings
from kvdrift.generator.documents.ends import TextEnds
from kvdrift.generator.engines.engine import Described, Side
from kvdrift.generator.engines.kernels import EngineKernels, PromptSide
from kvdrift.generator.identity import ActionIdentity, written_tokens
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import SamplingLaw
from kvdrift.schema.tables import SWRB

_LEAST_ENTRIES = 4096  # beside a prompt's, for streams: more streams share a call, but every stream reads past all
_STREAMS = 5  # of one replicate under residual branching, at most; a coupled rollout has 2 of a side


@dataclass(frozen=True)
class EngineModel:
    """Sides of an engine, as a ``Model`` of ``kvdrift.generator.generation.model``.

    ``sides`` are those of the actions by name, including the control's. ``tokenizer_sha256`` is that of the tokenizer
    of prompts; None without a tokenizer. ``ends`` are the tokens that end a text on all sides.
    """

    id: str
    engine: Described
    reference: Side
    sides: Mapping[str, Side]
    tokenizer_sha256: str | None
    law: SamplingLaw
    ends: TextEnds
    device: ClassVar[str] = "cpu"  # of the laws
    logits_dtype: ClassVar[None] = None
    row_multiple: ClassVar[int] = 1
    pairs_at_once: ClassVar[int] = 0  # a side's streams share its cache, which has one prompt

    @property
    def dtype(self) -> str:
        """The type of logits."""
        return "float32"

    @property
    def batch_deviation(self) -> float | None:
        """0 if rows do not depend on other rows; else None, since only the control measures the effect."""
        return 0.0 if self.reference.capabilities.row_invariant else None

    @functools.cached_property
    def description(self) -> Mapping[str, Any]:
        """The engine's description of itself."""
        return self.engine.description()

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units: both sides' weights and settings, and the engine's description."""
        side = self.sides[action.name]
        said = [self.description, self.reference.asked, side.asked, side.weights_sha256]
        said += [dict(one.said) for one in (self.reference, side) if one.said]
        weights = self.reference.weights_sha256 or _sha256(dict(self.reference.said))
        ends = written_tokens(self.ends.tokens)
        return ActionIdentity(weights, self.tokenizer_sha256, _sha256(said), eos_tokens=ends)

    def weight_bytes(self, action: Action) -> int | None:
        """Return the bytes of the weights of an action's side; None for a server."""
        return self.sides[action.name].weight_bytes() or None

    def twins(self, count: int, before: Callable[[], None]) -> list[EngineModel]:  # noqa: ARG002 - one thread asks
        """Return the model itself, since the engine has threads of its own."""
        return [self] * count

    def computing(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def prefill(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedSides:
        """Decode the document's prompt on every side."""
        self.check_prompt(document, horizon)
        prepared = [self._prefilled(side, document, horizon) for side in (self.reference, *self._sides(actions))]
        return PreparedSides(self, document, tuple(actions), horizon, prepared, self.law)

    def check_prompt(self, document: Document, horizon: int) -> None:
        """Refuse a prompt that a side cannot read."""
        for name, side in {"the reference": self.reference, **self.sides}.items():
            _check_prompt(document, horizon, side, name)

    def _sides(self, actions: Sequence[Action]) -> list[Side]:
        return [self.sides[action.name] for action in actions]

    def _prefilled(self, side: Side, document: Document, horizon: int) -> _Prefilled:
        began = time.perf_counter()
        session = side.open(document.prompt_tokens + streams_at_once(side, document.prompt_tokens, horizon) * horizon)
        logits = session.prefill(document.tokens)
        return _Prefilled(side, PromptSide(session, logits), session.prompt_bytes(), time.perf_counter() - began)


@dataclass(frozen=True)
class _Prefilled:
    """A side with a prompt: the bytes that the engine measures, and the seconds of decoding the prompt.

    The bytes are None if the engine does not report them.
    """

    side: Side
    decoded: PromptSide
    prompt_bytes: int | None
    seconds: float


class PreparedSides:
    """A document whose prompt all sides decoded: a ``PreparedDocument`` (``kvdrift.generator.generation.model``)."""

    def __init__(
        self, model: EngineModel, document: Document, actions: tuple[Action, ...], horizon: int,
        prepared: Sequence[_Prefilled], law: SamplingLaw,
    ) -> None:  # fmt: skip
        self._model, self._document, self._actions, self._horizon = model, document, actions, horizon
        self._prepared, self._law = prepared, law
        self._kernels: list[EngineKernels] = []  # the last ones, which laws of one document share

    def evict(self) -> PreparedSides:
        """Return the object itself, since the engine decides which entries a side keeps."""
        return self

    def kernels(
        self,
        streams: int,  # noqa: ARG002 - a session's room is fixed
        savings: Savings,  # noqa: ARG002 - sides share no prompt
        beside: Sequence[PreparedSides] = (),  # noqa: ARG002 - one document at a time
        parked: int = 0,  # noqa: ARG002
    ) -> EngineKernels:
        """Make kernels of all sides, after the streams of the kernels before are closed."""
        for before in self._kernels:
            before.close()
        made = EngineKernels([one.decoded for one in self._prepared], self._model.ends.tokens, self._law)
        self._kernels[:] = [made]
        return made

    def under(self, law: SamplingLaw) -> PreparedSides:
        """Return the same sides, with tokens drawn by another law than the model's."""
        other = PreparedSides(
            self._model, self._document, self._actions, self._horizon, self._prepared, law
        )  # fmt: skip
        other._kernels = self._kernels
        return other

    def replicates_at_once(self, actions: int, estimator: str) -> int:  # noqa: ARG002 - each has a cache of its own
        """Return how many replicates each side has room for; the others follow in further rounds."""
        entries = self._document.prompt_tokens
        fewest = min(streams_at_once(one.side, entries, self._horizon) for one in self._prepared)
        return max(fewest // (_STREAMS if estimator == SWRB else 2), 1)

    def record(self, number: int, streams: int) -> dict[str, Any]:  # noqa: ARG002 - streams share what is prefilled
        """Return the columns of ``units`` about side ``number``; bytes of the prompt are measured by the engine."""
        own, entries = self._prepared[number], self._document.prompt_tokens
        reference = self._prepared[0]
        share = reference.seconds / len(self._actions)
        said = {
            **self._model.description,
            "asked": dict(own.side.asked),
            "read_back": dict(own.decoded.session.read_back),
            "reference": dict(reference.side.asked),
            "weights_sha256": own.side.weights_sha256,
            "row_invariant": self._model.reference.capabilities.row_invariant,
        }
        if reference.side.said:
            said["reference_said"] = dict(reference.decoded.session.read_back)
        beside = None if own.prompt_bytes is None else 0
        return {
            "prompt_entries": entries, "kept_entries": entries, "payload_bytes": own.prompt_bytes,
            "scale_bytes": beside, "index_bytes": beside, "metadata_bytes": beside, "resident_bytes": own.prompt_bytes,
            "prefill_seconds": own.seconds + share, "engine": json.dumps(said, sort_keys=True),
        }  # fmt: skip

    def kept(self, number: int) -> tuple[()]:  # noqa: ARG002
        """Return nothing, since an engine does not report its entries."""
        return ()


def streams_at_once(side: Side, entries: int, horizon: int) -> int:
    """Return how many streams a session has room for beside a prompt of n ``entries``; at least those of one replicate.

    The number follows from the lengths alone, so that other memory makes no other rounds.
    """
    room = max(_LEAST_ENTRIES, 2 * entries) // horizon
    return min(max(room, _STREAMS), side.capabilities.most_streams)


def _sha256(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=dict).encode()).hexdigest()


def _check_prompt(document: Document, horizon: int, side: Side, name: str) -> None:
    facts, where = side.facts, f"document '{document.doc}'"
    if document.tokens and max(document.tokens) >= facts.vocabulary:
        raise InputError(
            f"{where}: token {max(document.tokens)} is none of the vocabulary, which has {facts.vocabulary}"
        )
    if facts.positions and document.prompt_tokens + horizon > facts.positions:
        raise InputError(
            f"{where}: {document.prompt_tokens} prompt tokens and {horizon} generated ones are more than the "
            f"{facts.positions} positions of {name}; ask for shorter prompts or a shorter horizon"
        )
