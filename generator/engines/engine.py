"""The interface of an engine's adapter: sides that describe themselves, and sessions with streams decoded in lockstep.

This interface knows no documents, couplings or distributions. A side is an engine's weights with settings. A session is
one side's cache, in which a prompt is decoded once. A stream continues the prompt, or another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.transformer.files.locations import transformer_location
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.errors import InputError, nearest


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a side, as its adapter promises them.

    Attributes:
        row_invariant: Whether the logits of a stream are the same bits whatever streams are decoded beside it, and
            wherever its entries lie. A second run of the reference must then have distances of 0, or the study fails.
        most_streams: The most streams that a session can have open at once.
        full_distributions: Whether logits cover all tokens; otherwise only the most probable token is known.
        grows: Whether a cache takes memory for the streams that are open, and not for the most streams.
    """

    row_invariant: bool
    most_streams: int
    full_distributions: bool = True
    grows: bool = False


@dataclass(frozen=True)
class SideFacts:
    """The facts that a side's weights state about their model."""

    vocabulary: int  # V, the number of tokens
    positions: int  # the largest number of tokens, prompt and generated tokens; 0 if unknown
    eos_tokens: tuple[int, ...]  # tokens that end a text, as the engine reports; () if it does not
    tokenizer_sha256: str | None  # SHA-256 of the tokenizer in the weights; None without a tokenizer


@dataclass(frozen=True)
class Room:
    """The room that a session needs: for a prompt, and for streams that each continue the prompt.

    Attributes:
        prompt: The tokens of the prompt.
        streams: How many streams are open at once.
        horizon: The tokens of each stream.
    """

    prompt: int
    streams: int
    horizon: int

    @property
    def entries(self) -> int:
        """The entries of a cache in which the streams share the prompt."""
        return self.prompt + self.streams * self.horizon

    @property
    def doubled(self) -> Room:
        """The room for the same prompt and twice as many streams."""
        return replace(self, streams=2 * self.streams)


class Session(Protocol):
    """One side's cache. A stream is named by a number; logits are float32 over the whole vocabulary."""

    @property
    def read_back(self) -> Mapping[str, Any]:
        """Return the settings as the engine reports them, by name."""

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Decode a prompt, in place of an earlier prompt and its streams, and return the logits after it, [V]."""

    def fork(self, stream: int | None = None) -> int:
        """Open a stream that continues another stream, or the prompt; return its number."""

    def drop(self, stream: int) -> None:
        """Close a stream."""

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams, and return the next logits, [streams, V]."""

    def begin(self, streams: Sequence[int], tokens: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
        """Begin a step, and return a function that ends the step and returns the next logits, [streams, V].

        All sides of a position begin before the first ends, so that servers can work at the same time.
        """
        return partial(self.step, streams, tokens)

    def prompt_bytes(self) -> int | None:
        """Return the bytes of the prompt's entries as the engine measures them; None if it does not measure them."""
        return None

    def peak_bytes(self) -> int | None:
        """Return the most bytes that a stream's cache had at any step; None if the prompt's bytes stand for them."""
        return None

    def kept_entries(self) -> int | None:
        """Return the mean number of the prompt's entries that a KV head of a layer keeps; None if it cannot be told."""
        return None

    def kept(self) -> KeptEntries | None:
        """Return the entries of the prompt that the cache keeps, by position; None if they cannot be told."""
        return None

    def close(self) -> None:
        """Free the cache."""


class Side(Protocol):
    """Weights with settings: the reference, or an action."""

    @property
    def facts(self) -> SideFacts:
        """The facts that the weights state about their model."""

    @property
    def requested(self) -> Mapping[str, Any]:
        """All settings by name, including defaults."""

    @property
    def reported(self) -> Mapping[str, Any]:
        """The facts that determine the distributions, as a server reports them; {} for an engine in this process."""
        return {}

    @property
    def code(self) -> Mapping[str, str]:
        """The code that settings name: whole expressions, and SHA-256 or versions of their modules; {} without any."""
        return {}

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities."""

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights; None if the engine does not report it."""
        return None

    def load(self) -> str:
        """Load the weights, and try what must be tried before the first session; return a remark for users, or ""."""
        return ""

    def open(self, room: Room) -> Session:
        """Open a cache with room for a prompt and its streams."""

    def cache_bytes(self, room: Room) -> int:  # noqa: ARG002 - an engine outside this process takes none
        """Return roughly how many bytes of this machine's memory a cache with that room takes."""
        return 0

    def weight_bytes(self) -> int:
        """Return roughly how many bytes of this machine's memory the weights take."""
        return 0


class Engine(Protocol):
    """An engine in this process: it finds weights that a study file names, and makes sides from them and settings.

    An adapter may inherit ``location`` and ``tokenizer`` if its weights are a transformer's: a folder or a Hugging Face
    id that has the tokenizer, too.

    Attributes:
        ends: The source of the tokens that end a text, for messages that name each token with its source.
        sample: The ``id`` of the weights that ``kvdrift check`` takes if none are given; None if they must be given.
        fewer_bits: Settings with which a prompt takes fewer bytes than with the defaults.
        of_cache: The settings that determine the cache: a kernel floor has the reference's values.
    """

    ends: ClassVar[str] = "the engine"
    sample: ClassVar[str | None] = None
    fewer_bits: ClassVar[Mapping[str, Any]]
    of_cache: ClassVar[tuple[str, ...]]

    def description(self) -> Mapping[str, Any]:
        """Describe the engine: name, version, digests of its libraries, and environment variables that affect it."""

    def location(self, written: str, folder: Path | None, key: str) -> str:
        """Return the place of the weights that a study file in ``folder`` names by the text ``written``.

        Error lines begin with ``key``, such as "model.id = "; it is "" if no study file names the weights.
        """
        return transformer_location(written, folder, key)

    def tokenizer(self, location: str) -> str:
        """Return the place of the tokenizer of weights: a folder, a Hugging Face id or a GGUF file."""
        return location

    def side(self, location: str, settings: Mapping[str, Any], where: str, folder: Path | None = None) -> Side:
        """Make a side of the weights at ``location`` and of the settings, by name, that differ from the defaults.

        Error lines begin with ``where``, such as the name of an action. Modules of the user are looked for in
        ``folder``, that of the study file.
        """

    def check_beside(self, reference: Side, side: Side, where: str) -> None:
        """Refuse a side that cannot be compared with the reference; error lines begin with ``where``."""


_Settings = TypeVar("_Settings")


def settings_of(
    kind: type[_Settings], settings: Mapping[str, Any], where: str, whose: str, bounds: Mapping[str, tuple[int, int]]
) -> _Settings:
    """Return an object of ``kind``, a dataclass with defaults, with the ``settings`` that a study file gives by name.

    ``bounds`` has the least and the largest value of each whole number, by name. Error lines begin with ``where``;
    ``whose`` says in them whose settings these are, such as "servers".
    """
    known = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in known:
            raise InputError(f"{where}: unknown setting '{name}' of {whose}; {nearest(name, known)}")
        if type(value) is not type(known[name]):
            raise InputError(f"{where}: {name} = {value!r}: write a value like {known[name]!r}")
    for name, (least, most) in bounds.items():
        if not least <= (value := settings.get(name, known[name])) <= most:
            raise InputError(f"{where}: {name} = {value}: write {least} to {most}")
    return kind(**settings)
