"""The interface between generation and a model, which is a transformer or a set of finite-state systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.streams import SharingOptions, StreamDecoder
from kvdrift.generator.identity import ActionIdentity
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.document import Document
from kvdrift.schema.sampling import Sampling


class Model(Protocol):
    """The interface of a model: it computes next-token distributions for documents."""

    @property
    def id(self) -> str:
        """The model's id in the study file."""

    @property
    def device(self) -> str:
        """The device that computes distributions, as torch names it."""

    @property
    def dtype(self) -> str:
        """The floating-point type of the model."""

    @property
    def logits_dtype(self) -> str | None:
        """The floating-point type of logits; None for the model's type."""

    @property
    def sampling(self) -> Sampling:
        """The temperature and truncation by which tokens are drawn."""

    @property
    def batch_deviation(self) -> float | None:
        """The most by which other rows of a batch change a row's results, relative to the largest result.

        0 if no row changes another row's results; None if the amount is unknown.
        """

    @property
    def row_multiple(self) -> int:
        """The number of rows that are computed at once is a multiple of this number."""

    @property
    def pairs_at_once(self) -> int:
        """The most pairs (action, replicate), of several documents together, that are decoded side by side.

        0 if each document is decoded alone, and by one thread, since one document keeps the device busy.
        """

    def twins(self, count: int, before: Callable[[], None]) -> Iterable[Model]:
        """Return a model for each of ``count`` threads.

        Transformers call ``before`` before each pass through the network, and its errors end the work.
        """

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units."""

    def weight_bytes(self, action: Action) -> int | None:
        """Return the bytes of the weight files of an action's side; None if there are none or they are unknown."""

    def computing(self) -> AbstractContextManager[None]:
        """Set up the process for this model's computations inside the block, and restore it afterwards."""

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedDocument:
        """Process the document's prompt once for all ``actions``, and make the cache of every action."""


class PreparedDocument(Protocol):
    """A document with the caches of its actions, numbered from 1 in their order; cache 0 is the whole prompt."""

    def kernels(
        self, streams: int, sharing: SharingOptions, beside: Sequence[Self] = (), parked: int = 0
    ) -> StreamDecoder:
        """Return a decoder with room for ``streams`` open and ``parked`` parked streams.

        The streams are those of this document and of the documents ``beside`` it; parked streams are kept to be
        continued later. The caches of this document are numbered first, then those of each further document.
        """

    def under(self, sampling: Sampling) -> Self:
        """Return the same caches, with the distributions of ``sampling`` in place of the model's."""

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """Return how many replicates of each action fit into the free memory; at least 1."""

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """Return the columns of ``units`` about cache ``number``: entries, bytes, hashes, seconds.

        ``streams`` is how many streams decode with the cache, which need memory too.
        """

    def kept(self, number: int) -> Sequence[KeptEntries]:
        """Return the prompt entries that cache ``number`` has after prefill and after later steps; empty if unknown."""
