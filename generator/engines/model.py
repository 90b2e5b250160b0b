"""An engine as the model of a study: the reference and each action is a side, with a cache of its own.

The floor, a second run of the reference, is treated like an action. It shares nothing with the first run. If the
adapter promises ``row_invariant``, every distance of the floor must be exactly 0.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.sampling import deployed
from kvdrift.generator.coupling.streams import SharingOptions, StreamDecoder
from kvdrift.generator.engines.engine import Capabilities, Room, Session, Side
from kvdrift.generator.identity import ActionIdentity, written_tokens
from kvdrift.generator.transformer.files.text_ends import TextEnds
from kvdrift.generator.transformer.memory import available_bytes
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.tables import SWRB


@dataclass(frozen=True)
class RepeatedReference:
    """The floor of an engine in this process: the reference again, in whose sessions every stream has a double.

    A second cache alone would repeat the reference's calls row for row and show no difference. Each stream therefore
    has a double beside it, which is decoded and ignored. Calls then have twice as many rows, as calls of an action with
    diverged pairs have, and entries lie in other places. The remaining difference comes from batches and from the
    placement of entries.
    """

    side: Side

    def __getattr__(self, name: str) -> Any:
        """Return what the side has by that name."""
        return getattr(self.side, name)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the side, with half as many streams."""
        capabilities = self.side.capabilities
        return replace(capabilities, most_streams=capabilities.most_streams // 2)

    def load(self) -> str:
        """Load nothing beyond the reference."""
        return ""

    def open(self, room: Room) -> Session:
        """Open a session whose cache has room for streams and doubles."""
        return _Doubled(self.side.open(room.doubled))

    def cache_bytes(self, room: Room) -> int:
        """Return the bytes of the cache, including the doubles."""
        return self.side.cache_bytes(room.doubled)


class _Doubled:
    """A session in which every stream has a double, which is opened just before the stream itself."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._double: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._double = {}
        return self._session.prefill(tokens)

    def fork(self, stream: int | None = None) -> int:
        double = self._session.fork(stream)
        new = self._session.fork(stream)
        self._double[new] = double
        return new

    def drop(self, stream: int) -> None:
        self._session.drop(self._double.pop(stream))
        self._session.drop(stream)

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        return self.begin(streams, tokens)()

    def begin(self, streams: Sequence[int], tokens: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
        doubles = [self._double[stream] for stream in streams]
        begun = self._session.begin([*doubles, *streams], [*tokens, *tokens])
        return lambda: begun()[len(doubles) :]


DOUBLE_VOCABULARY = 4096  # distributions over more tokens are float32


@dataclass(frozen=True)
class PromptSide:
    """A side's session that has decoded a prompt.

    Attributes:
        logits: The logits after the prompt, float32 [V].
        prompt_bytes: The bytes of the prompt's entries as the engine measures them; None if it does not report them.
        seconds: The seconds of decoding the prompt.
    """

    side: Side
    session: Session
    logits: NDArray[np.float32]
    prompt_bytes: int | None
    seconds: float


@dataclass(frozen=True)
class _Stream:
    cache: int
    handle: int


class EngineStreams(StreamDecoder):
    """Streams of some sides.

    ``sides`` has for each cache the side that has decoded the prompt: cache 0 is the reference's, cache a is that of
    the a-th action. Each side prefills by itself, so the distributions of position 1 may differ.
    """

    def __init__(self, sides: Sequence[PromptSide], eos_tokens: tuple[int, ...], sampling: Sampling) -> None:
        super().__init__(eos_tokens, "cpu")
        self._sides, self._sampling = sides, sampling
        self._open: list[_Stream] = []
        self._parked: dict[int, _Stream] = {}

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream for each of ``caches`` at the prompt's end, and return their distributions, [streams, V]."""
        self.rewind()
        self._open = [_Stream(cache, self._sides[cache].session.fork()) for cache in caches]
        return self._distributions(np.stack([self._sides[cache].logits for cache in caches]))

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, int64 [streams], and return the next distributions, [streams, V]."""
        if not self._open:
            return torch.empty((0, len(self._sides[0].logits)), dtype=torch.float64)
        steps, tokens_left = [], iter(tokens.tolist())
        for cache, streams in groupby(self._open, key=lambda stream: stream.cache):
            handles = [stream.handle for stream in streams]
            steps.append(self._sides[cache].session.begin(handles, [next(tokens_left) for _ in handles]))
        return self._distributions(np.concatenate([logits() for logits in steps]))

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues old stream ``rows[i]``, int64 [streams].

        With n streams open, row n + i is parked stream i. A row may occur several times; parked streams stay.
        """
        before, taken, selected = self._open, set[int](), []
        for row in rows.tolist():
            if row < len(before) and row not in taken:
                taken.add(row)
                selected.append(before[row])
            else:  # a second stream of the same history; or one whose parked history stays
                selected.append(self._forked(before[row] if row < len(before) else self._parked[row - len(before)]))
        self._close(stream for row, stream in enumerate(before) if row not in taken)
        self._open = selected

    @property
    def cuts_back(self) -> bool:
        """Whether a parked stream can be continued from positions before the one at which it was parked: False here."""
        return False

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of the open streams ``rows`` as the parked streams ``places``, both int64 [parked]."""
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            if place in self._parked:
                self._close([self._parked[place]])
            self._parked[place] = self._forked(self._open[row])

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
        self._close(self._open)
        self._open = []

    def close(self) -> None:
        """Close all streams."""
        self.rewind()
        self._close(self._parked.values())
        self._parked = {}

    def _forked(self, stream: _Stream) -> _Stream:
        return _Stream(stream.cache, self._sides[stream.cache].session.fork(stream.handle))

    def _close(self, streams: Iterable[_Stream]) -> None:
        for stream in streams:
            self._sides[stream.cache].session.drop(stream.handle)

    def _distributions(self, logits: NDArray[np.float32]) -> Tensor:
        dtype = torch.float64 if logits.shape[-1] <= DOUBLE_VOCABULARY else torch.float32
        distributions = torch.empty(logits.shape, dtype=dtype)
        deployed(torch.from_numpy(logits), self._sampling, distributions)
        return distributions


_LEAST_ENTRIES = 4096  # for streams, beside a prompt's; with more, calls have more rows, but a row passes all entries
_STREAMS = 5  # of one replicate under residual branching, at most; a coupled rollout has 2 of a side


@dataclass(frozen=True)
class EngineModel:
    """Sides of an engine, as a ``Model`` of ``kvdrift.generator.generation.model``.

    ``description`` is the engine's of itself. ``sides`` has the side of each action, the floor among them, by the
    action's name. ``tokenizer_sha256`` is SHA-256 of the prompts' tokenizer; None without a tokenizer. ``ends`` are the
    tokens that end a text on all sides.
    """

    id: str
    description: Mapping[str, Any]
    reference: Side
    sides: Mapping[str, Side]
    tokenizer_sha256: str | None
    sampling: Sampling
    ends: TextEnds
    device: ClassVar[str] = "cpu"  # of the distributions
    dtype: ClassVar[str] = "float32"  # of logits
    logits_dtype: ClassVar[None] = None
    row_multiple: ClassVar[int] = 1
    pairs_at_once: ClassVar[int] = 0  # a side's streams share its cache, which has one prompt

    @property
    def batch_deviation(self) -> float | None:
        """0 if other rows of a batch change no row's logits; else None, since only the floor measures by how much."""
        return 0.0 if self.reference.capabilities.row_invariant else None

    def load(self, say: Callable[[str], None]) -> None:
        """Load the weights of all sides and try what must be tried; ``say`` gets the remarks of the sides."""
        for name, side in {"the reference": self.reference, **self.sides}.items():
            if remark := side.load():
                say(f"{name}: {remark}")

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units: both sides' weights and settings, and the engine's description."""
        side = self.sides[action.name]
        content = [self.description, self.reference.requested, side.requested, side.weights_sha256]
        content += [dict(reporting.reported) for reporting in (self.reference, side) if reporting.reported]
        content += [dict(running.code) for running in (self.reference, side) if running.code]
        weights = self.reference.weights_sha256 or _sha256(dict(self.reference.reported))
        ends = written_tokens(self.ends.tokens)
        return ActionIdentity(weights, self.tokenizer_sha256, _sha256(content), eos_tokens=ends)

    def weight_bytes(self, action: Action) -> int | None:
        """Return the bytes of the weights of an action's side; None for a server."""
        return self.sides[action.name].weight_bytes() or None

    def twins(self, count: int, before: Callable[[], None]) -> list[EngineModel]:  # noqa: ARG002 - one thread decodes
        """Return the model itself, ``count`` times, since the engine has threads of its own."""
        return [self] * count

    def computing(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedSides:
        """Decode the document's prompt on every side."""
        self.check_prompt(document, horizon)
        sides = [self.reference, *(self.sides[action.name] for action in actions)]
        prepared = [self._prefilled(side, document, horizon) for side in sides]
        return PreparedSides(self, document, actions, horizon, prepared, self.sampling)

    def check_prompt(self, document: Document, horizon: int) -> None:
        """Refuse a document with a token that a side's vocabulary lacks, or with too many positions for a side."""
        for name, side in {"the reference": self.reference, **self.sides}.items():
            _check_prompt(document, horizon, side, name)

    def _prefilled(self, side: Side, document: Document, horizon: int) -> PromptSide:
        began = time.perf_counter()
        session = side.open(_room(side, document.prompt_tokens, horizon))
        logits = session.prefill(document.tokens)
        return PromptSide(side, session, logits, session.prompt_bytes(), time.perf_counter() - began)


@dataclass(frozen=True)
class PreparedSides:
    """A document whose prompt all sides decoded: a ``PreparedDocument`` (``kvdrift.generator.generation.model``).

    ``open_streams`` holds the decoder that ``kernels`` made last; the copies that ``under`` returns share this list.
    """

    model: EngineModel
    document: Document
    actions: Sequence[Action]
    horizon: int
    sides: Sequence[PromptSide]
    sampling: Sampling
    open_streams: list[EngineStreams] = field(default_factory=list)

    def kernels(
        self,
        streams: int,  # noqa: ARG002 - a session's room is fixed
        sharing: SharingOptions,  # noqa: ARG002 - sides share no prompt
        beside: Sequence[PreparedSides] = (),  # noqa: ARG002 - one document at a time
        parked: int = 0,  # noqa: ARG002
    ) -> EngineStreams:
        """Make a decoder of streams of all sides, and close the streams of the decoder made before."""
        for before in self.open_streams:
            before.close()
        self.open_streams[:] = [EngineStreams(self.sides, self.model.ends.tokens, self.sampling)]
        return self.open_streams[0]

    def under(self, sampling: Sampling) -> PreparedSides:
        """Return the same sides, with the distributions of ``sampling`` in place of the model's."""
        return replace(self, sampling=sampling)

    def replicates_at_once(self, actions: int, estimator: str) -> int:  # noqa: ARG002 - each has a cache of its own
        """Return how many replicates every side has room for at once; the others follow in further rounds."""
        entries = self.document.prompt_tokens
        fewest = min(streams_at_once(prefilled.side, entries, self.horizon) for prefilled in self.sides)
        return max(fewest // (_STREAMS if estimator == SWRB else 2), 1)

    def record(self, number: int, streams: int) -> dict[str, Any]:  # noqa: ARG002 - streams share what is prefilled
        """Return the columns of ``units`` about side ``number``, with the prompt's bytes as its engine measured."""
        prefilled, entries = self.sides[number], self.document.prompt_tokens
        reference = self.sides[0]
        share = reference.seconds / len(self.actions)
        engine = {
            **self.model.description,
            "asked": dict(prefilled.side.requested),
            "read_back": dict(prefilled.session.read_back),
            "reference": dict(reference.side.requested),
            "weights_sha256": prefilled.side.weights_sha256,
            "row_invariant": self.model.reference.capabilities.row_invariant,
        }
        if prefilled.side.code:
            engine["code"] = dict(prefilled.side.code)
        if reference.side.reported:
            engine["reference_said"] = dict(reference.session.read_back)
        kept, peak = prefilled.session.kept_entries(), prefilled.session.peak_bytes()
        held = prefilled.prompt_bytes if peak is None else peak
        beside = None if held is None else 0
        return {
            "prompt_entries": entries, "kept_entries": entries if kept is None else kept,
            "payload_bytes": held, "scale_bytes": beside, "index_bytes": beside, "metadata_bytes": beside,
            "resident_bytes": held,
            "prefill_seconds": prefilled.seconds + share, "engine": json.dumps(engine, sort_keys=True),
        }  # fmt: skip

    def kept(self, number: int) -> tuple[KeptEntries, ...]:
        """Return the entries that side ``number`` keeps of the prompt; () if its engine does not report them."""
        kept = self.sides[number].session.kept()
        return () if kept is None else (kept,)


def streams_at_once(side: Side, entries: int, horizon: int) -> int:
    """Return how many streams a session gets room for beside a prompt of ``entries`` entries.

    The number is enough for one replicate, and at most the side's ``most_streams``. It does not depend on free memory,
    so that replicates are decoded in the same rounds on every machine.
    """
    room = max(_LEAST_ENTRIES, 2 * entries) // horizon
    return min(max(room, _STREAMS), side.capabilities.most_streams)


def _room(side: Side, entries: int, horizon: int) -> Room:
    return Room(entries, streams_at_once(side, entries, horizon), horizon)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=dict).encode()).hexdigest()


def _check_prompt(document: Document, horizon: int, side: Side, name: str) -> None:
    facts, where = side.facts, f"document '{document.doc}'"
    if document.tokens and max(document.tokens) >= facts.vocabulary:
        raise InputError(
            f"{where}: token {max(document.tokens)} is beyond the {facts.vocabulary} tokens of {name}; prompts need "
            "that model's tokenizer"
        )
    if facts.positions and document.prompt_tokens + horizon > facts.positions:
        raise InputError(
            f"{where}: {document.prompt_tokens} prompt tokens and {horizon} generated tokens are more than the "
            f"{facts.positions} positions of {name}; ask for shorter prompts or a shorter horizon"
        )


@dataclass(frozen=True)
class EngineFootprint:
    """The bytes of all weight files, of all sides' caches of one prompt together, and of this machine's free memory.

    ``replicates_at_once`` is how many replicates are decoded together; the others follow in rounds.
    """

    weights: int
    caches: int
    replicates_at_once: int
    available: int

    @property
    def fits(self) -> bool:
        """Whether the weights and caches fit into the free memory."""
        return self.weights + self.caches <= self.available

    @property
    def words(self) -> str:
        """The bytes in words."""
        sizes = (self.weights, self.caches, self.available)
        weights, caches, available = (f"{size / 2**20:,.1f} MiB" for size in sizes)
        return (
            f"{weights} of weights and {caches} of caches for the longest prompt, up to {self.replicates_at_once} "
            f"replicates at once; {available} available{'' if self.fits else ', which is too little'}"
        )


def engine_footprint(
    model: EngineModel, lengths: Sequence[int], horizon: int, replicates: int
) -> EngineFootprint:  # fmt: skip
    """Return the bytes that generation takes for the longest prompt.

    ``lengths`` are the prompts' lengths in tokens, and ``replicates`` is the most that a document has of an action.
    """
    longest, sides = max(lengths), [model.reference, *model.sides.values()]
    weights = {side.weights_sha256: side.weight_bytes() for side in sides}
    rooms = [_room(side, longest, horizon) for side in sides]
    open_at_once = [
        replace(room, streams=min(room.streams, 2 * replicates)) if side.capabilities.grows else room
        for side, room in zip(sides, rooms, strict=True)
    ]
    caches = sum(side.cache_bytes(room) for side, room in zip(sides, open_at_once, strict=True))
    return EngineFootprint(
        sum(weights.values()),
        caches,
        min(streams_at_once(side, longest, horizon) for side in sides) // 2,
        available_bytes("cpu"),
    )
