"""Checks that an adapter of an engine in this process, and a server, must pass; ``kvdrift check`` runs them.

The checks of an adapter are about logits, forks, drops, repetition, rows, bytes, and settings read back. Those of a
server are about whole distributions, repetition, separate streams, its report of itself, and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, ParamSpec

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Engine, Room, Session, Side
from kvdrift.generator.engines.http.engine import ServerSide
from kvdrift.schema.errors import OperationError

_PROMPT, _STEPS, _SEED = 160, 6, 5
_CLOSE = 0.05  # of the largest logit: the effect of batches that is allowed unless the adapter promises row invariance
_BESIDE = 0.2  # of the largest logit: the effect of rows beside a stream then; .07 was measured with weights in Q4_K_M

Values = NDArray[np.float32]
Tried = ParamSpec("Tried")


@dataclass(frozen=True)
class Unknown:
    """The outcome of a check that cannot be made: ``why`` says what the engine does not report, and what follows."""

    why: str


@dataclass(frozen=True)
class SideCheck(Generic[Tried]):
    """A check that an adapter, or a server, must pass; ``tried`` says in one line what is tried.

    ``function`` runs the check on an engine and weights, or on a server's side; it returns a line about the result,
    or raises an error that names the fault.
    """

    name: str
    tried: str
    function: Callable[Tried, str | Unknown]


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


def _side(engine: Engine, weights: str) -> Side:
    return engine.side(weights, {}, "check")


def _check_logits(engine: Engine, weights: str) -> str:
    side = _side(engine, weights)
    with prompted(side) as (session, first):
        rows = session.step([session.fork(), session.fork()], tokens_of(side, 2))
        if first.shape != (side.facts.vocabulary,) or rows.shape != (2, side.facts.vocabulary):
            raise OperationError(
                f"logits have the shapes {first.shape} and {rows.shape}, and not (V,) and (2, V) for V = "
                f"{side.facts.vocabulary}"
            )
        if not (np.isfinite(first).all() and np.isfinite(rows).all()):
            raise OperationError("some logits are not finite")
    return f"{side.facts.vocabulary} numbers a stream"


def _check_fork(engine: Engine, weights: str) -> str:
    side = _side(engine, weights)
    with prompted(side) as (session, _):
        first = session.fork()
        _written(session, side, [first])
        both = _written(session, side, [first, session.fork(first)], _STEPS)
        apart = float(np.abs(both[0] - both[1]).max() / np.abs(both).max())
        if apart > (0.0 if side.capabilities.row_invariant else _CLOSE):
            raise OperationError(
                f"logits of two streams of one history differ by {apart:.2g} of the largest logit; they must be "
                f"equal, or nearly so (within {_CLOSE}) if the adapter does not promise row_invariant"
            )
        other = session.step([first, session.fork(first)], tokens_of(side, 2))
        if np.array_equal(other[0], other[1]):
            raise OperationError(
                "two streams that were fed different tokens have the same logits; each must follow from its own tokens"
            )
    return f"logits of copies differ by {apart:.1g} of the largest logit"


def _check_drop(engine: Engine, weights: str) -> str:
    side = _side(engine, weights)
    most = min(side.capabilities.most_streams, 16)
    with prompted(side, most) as (session, _):
        for _ in range(12):
            streams = [session.fork() for _ in range(most)]
            _written(session, side, streams)
            for stream in streams:
                session.drop(stream)
    return f"12 times {most} streams, in a cache with room for {2 * most}"


def _check_repetition(engine: Engine, weights: str) -> str:
    side, results = _side(engine, weights), []
    for _ in range(2):
        with prompted(side) as (session, first):
            results.append((first, _written(session, side, [session.fork() for _ in range(3)])))
    if not all(np.array_equal(first, second) for first, second in zip(*results, strict=True)):
        raise OperationError("the same calls gave other logits the second time; they must give the same bits")
    return "the same bits twice"


def _check_rows(engine: Engine, weights: str) -> str:
    side, first_rows = _side(engine, weights), []
    for beside in (0, 1, 6):
        with prompted(side) as (session, _):
            streams = [session.fork() for _ in range(beside + 1)]
            for token in tokens_of(side, _STEPS):
                rows = session.step(streams, [token, *tokens_of(side, beside)])
            first_rows.append(rows[0])
    apart = max(float(np.abs(row - first_rows[0]).max() / np.abs(first_rows[0]).max()) for row in first_rows)
    if apart > (0.0 if side.capabilities.row_invariant else _BESIDE):
        raise OperationError(
            f"a stream's logits alone and with others beside it differ by {apart:.2g} of the largest logit; they must "
            f"be equal, or nearly so (within {_BESIDE}) if the adapter does not promise row_invariant"
        )
    return (
        f"logits differ by {apart:.1g} of the largest logit; the floor of a study measures the effect"
        if apart
        else ("the same bits, so that a floor of 0 is to be expected")
    )


def _check_bytes(engine: Engine, weights: str) -> str | Unknown:
    sizes = []
    for settings in ({}, engine.fewer_bits):
        with prompted(engine.side(weights, settings, "check")) as (session, _):
            sizes.append(session.prompt_bytes())
    full, fewer = sizes
    if full is None or fewer is None:
        return Unknown("the engine does not report bytes, so that no action is ruled out by its bytes")
    if not 0 < fewer < full:
        raise OperationError(
            f"a prompt takes {fewer:,} bytes with {dict(engine.fewer_bits)}, and {full:,} with the defaults: the "
            "former should be fewer, but not 0"
        )
    return f"{fewer:,} bytes instead of {full:,}"


def _check_read_back(engine: Engine, weights: str) -> str:
    side = engine.side(weights, engine.fewer_bits, "check")
    with prompted(side) as (session, _):
        read_back = {name: value for name, value in session.read_back.items() if name in side.requested}
    for name in engine.fewer_bits:
        if read_back.get(name) != side.requested[name]:
            raise OperationError(
                f"{name}: {side.requested[name]} was requested, and the engine reports {read_back.get(name)}"
            )
    return ", ".join(f"{name} {value}" for name, value in read_back.items())


ADAPTER_CHECKS = (
    SideCheck("logits", "a prompt and two streams", _check_logits),
    SideCheck("fork", "a stream and its copy, given the same tokens and then unlike ones", _check_fork),
    SideCheck("drop", "more streams in turn than the cache has room for at once", _check_drop),
    SideCheck("repetition", "the same calls in two sessions", _check_repetition),
    SideCheck("rows", "a stream alone, with one beside it, and with six", _check_rows),
    SideCheck("bytes", "the prompt's bytes at the defaults and at fewer bits", _check_bytes),
    SideCheck("read back", "the settings that the engine reports", _check_read_back),
)


_SERVER_STEPS = 6
_SERVER_CLOSE = 0.05  # total variation: the effect of batches that is allowed on a server

Distributions = NDArray[np.float64]


def _distribution(side: ServerSide, values: NDArray[np.float32]) -> Distributions:
    """Return a session's values as probabilities: the values themselves for a greedy side, else their exponentials."""
    wide = values.astype(np.float64)
    return np.exp(wide) if side.capabilities.full_distributions else wide


def _stepped(side: ServerSide, session: Session, streams: Sequence[int], tokens: Sequence[int]) -> Distributions:
    return _distribution(side, session.step(streams, tokens))


def _apart(first: Distributions, second: Distributions) -> float:
    """Return the total variation of two distributions."""
    return float(np.abs(first - second).sum()) / 2


def _check_distribution(side: ServerSide) -> str | Unknown:
    with prompted(side) as (session, values):
        distribution = _distribution(side, values)
        rows = _stepped(side, session, [session.fork()], tokens_of(side, 1))
    if distribution.shape != (side.facts.vocabulary,) or rows.shape != (1, side.facts.vocabulary):
        raise OperationError(
            f"distributions have the shapes {distribution.shape} and {rows.shape}, and not (V,) and (1, V) for V = "
            f"{side.facts.vocabulary}"
        )
    if not side.capabilities.full_distributions:
        return Unknown("only tokens are requested, not distributions")
    return (
        f"all {side.facts.vocabulary:,} log-probabilities, which sum to {distribution.sum():.6f} and {rows.sum():.6f}"
    )


def _check_server_repetition(side: ServerSide) -> str:
    sequences: list[list[Distributions]] = []
    for _ in range(2):
        with prompted(side) as (session, values):
            stream, sequence = session.fork(), [_distribution(side, values)]
            sequence.extend(_stepped(side, session, [stream], [token])[0] for token in tokens_of(side, _SERVER_STEPS))
            sequences.append(sequence)
    apart = max(_apart(first, second) for first, second in zip(*sequences, strict=True))
    if apart > _SERVER_CLOSE:
        raise OperationError(
            f"the same requests gave distributions {apart:.2g} apart in total variation, above the allowed "
            f"{_SERVER_CLOSE}"
        )
    return f"distributions {apart:.1g} apart in total variation" if apart else "the same bits twice"


def _check_streams(side: ServerSide) -> str:
    tokens = tokens_of(side, _SERVER_STEPS)
    with prompted(side) as (session, _):
        first = session.fork()
        for token in tokens:
            before = _stepped(side, session, [first], [token])
        copy = session.fork(first)
        both = _stepped(side, session, [first, copy], [tokens[0]] * 2)
        apart = _apart(both[0], both[1])
        if apart > _SERVER_CLOSE:
            raise OperationError(
                f"two streams of one history have distributions {apart:.2g} apart in total variation, above the "
                f"allowed {_SERVER_CLOSE}"
            )
        unlike = _stepped(side, session, [first, copy], [tokens[1], tokens[2]])
        session.drop(copy)
        again = session.fork()
        for token in tokens:
            after = _stepped(side, session, [again], [token])
        moved = _apart(before[0], after[0])
    if side.capabilities.full_distributions and np.array_equal(unlike[0], unlike[1]):
        raise OperationError(
            "two streams that were fed different tokens have one distribution; each must follow from its own tokens"
        )
    if moved > _SERVER_CLOSE:
        raise OperationError(
            f"a stream's distributions alone and beside others are {moved:.2g} apart in total variation, above the "
            f"allowed {_SERVER_CLOSE}"
        )
    slots = f"{side.capabilities.most_streams} slots, one token a step" if side.server.slots else "no slots"
    return f"copies {apart:.1g} apart, a stream alone and beside others {moved:.1g}; {slots}"


def _check_report(side: ServerSide) -> str:
    with prompted(side) as (session, _):
        read_back = {name: value for name, value in session.read_back.items() if value not in (None, "", [])}
    unknown = sorted(name for name, value in side.reported.items() if value is None)
    named = ", ".join(f"{name} {value}" for name, value in read_back.items() if name != "chat_template")
    return f"{named}; unknown: {', '.join(unknown)}" if unknown else named


def _check_server_bytes(side: ServerSide) -> str | Unknown:
    with prompted(side) as (session, _):
        held = session.prompt_bytes()
    return (
        Unknown("the server does not report bytes, so that no action is ruled out by its bytes")
        if held is None
        else f"{held:,} bytes"
    )


SERVER_CHECKS = (
    SideCheck("distribution", "a prompt and one step", _check_distribution),
    SideCheck("repetition", "the same requests in two sessions", _check_server_repetition),
    SideCheck("streams", "a stream, its copy, unlike tokens, and the same stream beside others", _check_streams),
    SideCheck("read back", "the server's report of itself after a prompt", _check_report),
    SideCheck("bytes", "the bytes of the prompt", _check_server_bytes),
)
