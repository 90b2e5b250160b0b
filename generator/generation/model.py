"""What generation needs of a model, be it a transformer or a set of finite-state systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from generator.actions import Action
from generator.coupling.kernels import StreamKernels
from generator.coupling.streams import Savings
from generator.identity import ActionIdentity
from log.prompts import KeptEntries
from schema.document import Document
from schema.sampling import SamplingLaw


class Model(Protocol):
    """Something that has next-token laws for documents."""

    @property
    def id(self) -> str:
        """The model's id in the study file."""

    @property
    def device(self) -> str:
        """The device that computes laws, as torch names it."""

    @property
    def dtype(self) -> str:
        """The floating-point type of the model."""

    @property
    def logits_dtype(self) -> str | None:
        """The floating-point type of logits; None if it is that of the model."""

    @property
    def law(self) -> SamplingLaw:
        """The law that tokens are drawn by."""

    @property
    def batch_deviation(self) -> float | None:
        """How much a row's results depend on the rows computed with it, relative to the largest; 0 if not at all.

        None if they do and nobody measured how much.
        """

    @property
    def row_multiple(self) -> int:
        """What the number of rows computed at once is a multiple of."""

    @property
    def pairs_at_once(self) -> int:
        """Up to how many pairs (action, replicate) documents are worth decoding side by side.

        0 if never, since one document keeps the device busy; then one thread does, too.
        """

    def twins(self, count: int, before: Callable[[], None]) -> Iterable[Model]:
        """Make the model for ``count`` threads; ``before`` is called often, and what it raises ends the work."""

    def identity(self, action: Action) -> ActionIdentity:
        """What makes the units of an action.

        Raises:
            InputError: The selector's source cannot be read.
        """

    def weight_bytes(self, action: Action) -> int | None:
        """Bytes of the files that hold the weights of an action's side; None if there are none or nobody knows."""

    def computing(self) -> AbstractContextManager[None]:
        """Set up the process for this model's computations inside the block, and restore it afterwards."""

    def prefill(self, document: Document, actions: Sequence[Action], horizon: int) -> PrefilledDocument:
        """Process the document's prompt, recording what the selectors of ``actions`` need."""


class PrefilledDocument(Protocol):
    """A document's prompt, processed once for all actions."""

    def evict(self) -> PreparedDocument:
        """Make the cache of every action."""


class PreparedDocument(Protocol):
    """A document with the caches of its actions, numbered from 1 in their order; cache 0 is the whole prompt."""

    def kernels(self, streams: int, savings: Savings, beside: Sequence[Self] = (), parked: int = 0) -> StreamKernels:
        """Make kernels with room for so many open and parked streams, of this document and of those ``beside`` it.

        The caches of the next document are numbered after those of the one before.
        """

    def under(self, law: SamplingLaw) -> Self:
        """The same caches where tokens are drawn by another law than the model's."""

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """How many replicates of each of so many actions there is memory for now; at least 1."""

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """What ``units`` says of cache ``number`` and its ``streams`` streams: entries, bytes, hashes, seconds."""

    def kept(self, number: int) -> Sequence[KeptEntries]:
        """What cache ``number`` has of the prompt's entries, by position; empty if there are none or nobody knows."""
