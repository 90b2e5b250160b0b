"""What an engine's adapter fills: sides that say what they are, and sessions whose streams are decoded in lockstep.

Nothing here knows documents, couplings or laws. A side is an engine's weights with its settings; a session is one
side's cache, in which a prompt is decoded once. A stream goes on from the prompt, or from another stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Capabilities:
    """What an adapter promises of a side.

    Attributes:
        row_invariant: Whether the logits of a stream are the same bits whatever streams are decoded beside it, and
            wherever its entries lie. The floor must then be exactly 0, or a run fails.
        most_streams: How many streams a session can have open at once.
        full_laws: Whether logits are those of all tokens; else they say which token is the most probable, and nothing
            more.
    """

    row_invariant: bool
    most_streams: int
    full_laws: bool = True


@dataclass(frozen=True)
class SideFacts:
    """What a side's weights say of their model.

    Attributes:
        vocabulary: V, how many tokens there are.
        positions: The largest number of tokens, prompt and generated ones.
        eos_tokens: Tokens that end a text, ascending.
        tokenizer_sha256: SHA-256 of the tokenizer that the weights bring; None where they bring none.
    """

    vocabulary: int
    positions: int
    eos_tokens: tuple[int, ...]
    tokenizer_sha256: str | None


class Session(Protocol):
    """One side's cache. Streams are numbers; logits are float32 over the whole vocabulary."""

    @property
    def read_back(self) -> Mapping[str, Any]:
        """The settings as the engine says them, by name."""

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Decode a prompt, in place of the one before and its streams, and return the logits after it, [V]."""

    def fork(self, stream: int | None = None) -> int:
        """Open a stream that goes on from another one, or from the prompt."""

    def drop(self, stream: int) -> None:
        """Close a stream."""

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams, and return the next logits, [streams, V]."""

    def prompt_bytes(self) -> int | None:
        """Return how many bytes the prompt's entries take, as the engine measures it; None if it does not say."""

    def close(self) -> None:
        """Free the cache."""


class Side(Protocol):
    """Weights with settings: the reference, or an action."""

    @property
    def facts(self) -> SideFacts:
        """What the weights say of their model."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """All settings by name, those that nobody gave at their defaults."""

    @property
    def said(self) -> Mapping[str, Any]:
        """What else makes the side's laws, as an engine that is not in this process says; {} in this process."""

    @property
    def capabilities(self) -> Capabilities:
        """What the adapter promises."""

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights; None where the engine does not say."""

    def open(self, entries: int) -> Session:
        """Open a cache with room for so many entries, the prompt's and those of all streams.

        Raises:
            InputError: The engine refuses the settings, or reads back others.
        """

    def cache_bytes(self, entries: int) -> int:
        """Return about how many bytes a cache with room for so many entries takes."""

    def weight_bytes(self) -> int:
        """Return about how many bytes the weights take in memory."""


class Described(Protocol):
    """What says what decodes."""

    def description(self) -> Mapping[str, Any]:
        """What the engine is: name, version, digests of its libraries, and the environment variables that move it."""


class Engine(Described, Protocol):
    """An engine in this process: it makes sides of weights and settings."""

    @property
    def fewer_bits(self) -> Mapping[str, Any]:
        """Settings with which a prompt takes fewer bytes than with the defaults."""

    def side(self, weights: Path, settings: Mapping[str, Any], where: str) -> Side:
        """Make a side.

        Args:
            weights: The file with the weights.
            settings: Those that differ from the engine's defaults, by name.
            where: What error lines name, such as an action.
        """
