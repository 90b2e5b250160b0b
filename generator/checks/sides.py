"""Checks that an adapter of an engine in this process, and a server, must pass; ``kvdrift check`` runs them.

They are about logits or distributions, forks, drops, repetition, rows, bytes, and settings read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.checks.trial import Check, Unknown, require
from kvdrift.generator.engines.engine import Engine, Room, Session, Side

_PROMPT, _STEPS, _SEED = 160, 6, 5
_CLOSE = 0.05  # how far apart streams may be unless the side promises row invariance
_BESIDE = 0.2  # the same for logits with and without rows beside them; .07 was measured with weights in Q4_K_M

Values = NDArray[np.float32]


@dataclass(frozen=True)
class SideTrial:
    """A side that is tried, and the same one with settings that take fewer bits; None for a server."""

    part: Side
    fewer: Side | None = None

    @classmethod
    def of(cls, engine: Engine, weights: str) -> SideTrial:
        """Return the sides of an engine in this process."""
        return cls(engine.side(weights, {}, "check"), engine.side(weights, engine.fewer_bits, "check"))

    @property
    def in_process(self) -> bool:
        """Whether the side is an engine's in this process, and no server."""
        return self.fewer is not None

    def apart(self, first: Values, second: Values) -> float:
        """Return how far apart values are: logits in units of the largest one, a server's in total variation."""
        if self.in_process:
            return float(np.abs(first - second).max() / np.abs(first).max())
        one, other = (values.astype(np.float64) for values in (first, second))
        if self.part.capabilities.full_distributions:
            one, other = np.exp(one), np.exp(other)
        return float(np.abs(one - other).sum(-1).max()) / 2

    def words(self, apart: float) -> str:
        """Return a distance in words."""
        return f"{apart:.2g} {'of the largest logit' if self.in_process else 'in total variation'}"

    def require_close(self, apart: float, most: float, what: str) -> None:
        """Raise an error if values are more than ``most`` apart; ``what`` names them."""
        require(apart <= most, f"{what} differ by {self.words(apart)}; allowed is {most}")

    @property
    def close(self) -> float:
        """How far apart the streams of one history may be."""
        return 0.0 if self.part.capabilities.row_invariant else _CLOSE


def tokens_of(side: Side, count: int) -> list[int]:
    """Return ``count`` tokens, at most 160, that do not end a text; each call returns the same tokens."""
    others = [token for token in range(side.facts.vocabulary) if token not in side.facts.eos_tokens]
    return [others[place] for place in np.random.default_rng(_SEED).integers(0, len(others), _PROMPT)[:count]]


@contextmanager
def prompted(side: Side, streams: int = 8) -> Iterator[tuple[Session, Values]]:
    """Open a session with a prompt of 160 tokens and room for ``streams`` streams; yield it and the logits after it."""
    session = side.open(Room(_PROMPT, streams, _STEPS))
    try:
        yield session, session.prefill(tokens_of(side, _PROMPT))
    finally:
        session.close()


def _written(session: Session, side: Side, streams: Sequence[int], first: int = 0) -> Values:
    """Return the logits after 3 steps in which all streams get the prompt's tokens from ``first`` on, [streams, V]."""
    for token in tokens_of(side, _PROMPT)[first : first + _STEPS // 2]:
        logits = session.step(streams, [token] * len(streams))
    return logits


def _check_logits(tried: SideTrial) -> str:
    side, size = tried.part, tried.part.facts.vocabulary
    with prompted(side) as (session, first):
        rows = session.step([session.fork(), session.fork()], tokens_of(side, 2))
    shapes = f"shapes are {first.shape} and {rows.shape}, and not (V,) and (2, V) for V = {size}"
    require(first.shape == (size,) and rows.shape == (2, size), shapes)
    if not side.capabilities.full_distributions:
        return Unknown("only tokens are requested, not distributions")
    if not tried.in_process:
        return f"all {size:,} log-probabilities, which sum to {np.exp(first.astype(np.float64)).sum():.6f}"
    require(bool(np.isfinite(first).all() and np.isfinite(rows).all()), "some logits are not finite")
    return f"{size} numbers a stream"


def _check_fork(tried: SideTrial) -> str:
    side = tried.part
    with prompted(side) as (session, _):
        first = session.fork()
        _written(session, side, [first])
        both = _written(session, side, [first, session.fork(first)], _STEPS)
        apart = tried.apart(both[0], both[1])
        tried.require_close(apart, tried.close, "two streams of one history")
        other = session.step([first, session.fork(first)], tokens_of(side, 2))
    unlike = not side.capabilities.full_distributions or not np.array_equal(other[0], other[1])
    require(unlike, "two streams that were fed different tokens are equal; each must follow from its own tokens")
    return f"copies differ by {tried.words(apart)}"


def _check_drop(tried: SideTrial) -> str:
    side = tried.part
    most = min(side.capabilities.most_streams, 16)
    with prompted(side, most) as (session, _):
        for _ in range(12):
            streams = [session.fork() for _ in range(most)]
            _written(session, side, streams)
            for stream in streams:
                session.drop(stream)
    return f"12 times {most} streams, in a cache with room for {2 * most}"


def _check_repetition(tried: SideTrial) -> str:
    side, results = tried.part, list[Values]()
    for _ in range(2):
        with prompted(side) as (session, logits):
            results.append(np.stack([logits, *_written(session, side, [session.fork() for _ in range(3)])]))
    first, second = results
    if np.array_equal(first, second):
        return "the same bits twice"
    apart = tried.apart(first, second)
    tried.require_close(apart, 0.0 if tried.in_process else _CLOSE, "the same calls")
    return f"the same calls differ by {tried.words(apart)}"


def _check_rows(tried: SideTrial) -> str:
    side, first_rows = tried.part, list[Values]()
    for beside in (0, 1, 6):
        with prompted(side) as (session, _):
            streams = [session.fork() for _ in range(beside + 1)]
            for token in tokens_of(side, _STEPS):
                rows = session.step(streams, [token, *tokens_of(side, beside)])
            first_rows.append(rows[0])
    apart = max(tried.apart(first_rows[0], row) for row in first_rows)
    most = _BESIDE if tried.close and tried.in_process else tried.close
    tried.require_close(apart, most, "a stream alone and with others")
    if not apart:
        return "the same bits, so that a floor of 0 is to be expected"
    return f"a stream differs by {tried.words(apart)}; the floor of a study measures the effect"


def _check_bytes(tried: SideTrial) -> str:
    sizes = []
    for side in (tried.part, tried.fewer or tried.part):
        with prompted(side) as (session, _):
            sizes.append(session.prompt_bytes())
    full, fewer = sizes
    if full is None or fewer is None:
        return Unknown("the engine does not report bytes, so that no action is ruled out by its bytes")
    if tried.fewer is None:
        return f"{full:,} bytes"
    changed = f"a prompt takes {fewer:,} bytes with {_changed(tried.part, tried.fewer)}, and {full:,} with the defaults"
    require(0 < fewer < full, f"{changed}: the former should be fewer, but not 0")
    return f"{fewer:,} bytes instead of {full:,}"


def _check_read_back(tried: SideTrial) -> str:
    side = tried.fewer or tried.part
    with prompted(side) as (session, _):
        read_back = {name: value for name, value in session.read_back.items() if value not in (None, "", [])}
    for name, requested in _changed(tried.part, side).items():
        reported = read_back.get(name)
        require(reported == requested, f"{name}: {requested} was requested, and the engine reports {reported}")
    named = ", ".join(f"{name} {value}" for name, value in read_back.items() if name != "chat_template")
    unknown = sorted(name for name, value in side.reported.items() if value is None)
    return f"{named}; unknown: {', '.join(unknown)}" if unknown else named


def _changed(side: Side, other: Side) -> dict[str, object]:
    """Return the settings of another side that differ from those of a side."""
    return {name: value for name, value in other.requested.items() if side.requested.get(name) != value}


ADAPTER_CHECKS: tuple[Check, ...] = (
    Check("logits", "a prompt and two streams", _check_logits),
    Check("fork", "a stream and its copy, given the same tokens and then unlike ones", _check_fork),
    Check("drop", "more streams in turn than the cache has room for at once", _check_drop),
    Check("repetition", "the same calls in two sessions", _check_repetition),
    Check("rows", "a stream alone, with one beside it, and with six", _check_rows),
    Check("bytes", "the bytes of a prompt", _check_bytes),
    Check("read back", "the settings that the engine reports", _check_read_back),
)
SERVER_CHECKS = tuple(check for check in ADAPTER_CHECKS if check.function is not _check_drop)  # a server has its slots
