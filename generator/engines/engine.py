"""The interface of an engine's adapter: sides that describe themselves, and sessions with streams decoded in lockstep.

This interface knows no documents, couplings or laws. A side is an engine's weights with settings. A session is one
side's cache, in which a prompt is decoded once. A stream continues the prompt, or another stream.
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
    """The promises of an adapter about a side.

    Attributes:
        row_invariant: Whether the logits of a stream are the same bits whatever streams are decoded beside it, and
            wherever its entries lie. The floor must then be exactly 0, or a run fails.
        most_streams: The most streams that a session can have open at once.
        full_laws: Whether logits cover all tokens; otherwise they only tell the most probable token.
    """

    row_invariant: bool
    most_streams: int
    full_laws: bool = True


@dataclass(frozen=True)
class SideFacts:
    """The facts that a side's weights state about their model."""

    vocabulary: int  # V, the number of tokens
    positions: int  # the largest number of tokens, prompt and generated tokens
    eos_tokens: tuple[int, ...]  # tokens that end a text, as far as the engine says; () if it does not
    tokenizer_sha256: str | None  # SHA-256 of the tokenizer in the weights; None without a tokenizer


class Session(Protocol):
    """One side's cache. Streams are numbers; logits are float32 over the whole vocabulary."""

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

    def prompt_bytes(self) -> int | None:
        """Return the bytes of the prompt's entries as the engine measures them; None if it does not say."""

    def close(self) -> None:
        """Free the cache."""


class Side(Protocol):
    """Weights with settings: the reference, or an action."""

    @property
    def facts(self) -> SideFacts:
        """The facts that the weights state about their model."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """All settings by name, including defaults."""

    @property
    def said(self) -> Mapping[str, Any]:
        """The report of an engine outside this process, which also determines the laws; {} in this process."""

    @property
    def capabilities(self) -> Capabilities:
        """The adapter's promises."""

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights; None if the engine does not say."""

    def open(self, entries: int) -> Session:
        """Open a cache with room for ``entries`` entries, those of the prompt and of all streams."""

    def cache_bytes(self, entries: int) -> int:
        """Return roughly how many bytes a cache with room for ``entries`` entries takes."""

    def weight_bytes(self) -> int:
        """Return roughly how many bytes the weights take in memory."""


class Described(Protocol):
    """An engine that describes itself."""

    def description(self) -> Mapping[str, Any]:
        """Describe the engine: name, version, digests of its libraries, and environment variables that affect it."""


class Engine(Described, Protocol):
    """An engine in this process: it makes sides from weights and settings."""

    @property
    def fewer_bits(self) -> Mapping[str, Any]:
        """Return settings with which a prompt takes fewer bytes than with the defaults."""

    def side(self, weights: Path, settings: Mapping[str, Any], where: str) -> Side:
        """Make a side from a file of weights and the settings that differ from the engine's defaults, by name.

        ``where`` is what error lines name, such as an action.
        """
