"""Promises that a server must hold to be a side: whole laws, repetition, separate streams, and its report of itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Session
from kvdrift.generator.engines.http.engine import ServerSide
from kvdrift.generator.engines.promises import Promise, Unknown, prompted, tokens_of
from kvdrift.schema.errors import OperationError

_STEPS = 6
_CLOSE = 0.05  # total variation: what batches may do on a server

Laws = NDArray[np.float64]


def _law(side: ServerSide, values: NDArray[np.float32]) -> Laws:
    """Return probabilities from a session's values: from logarithms, or 1 for the token written by a greedy side."""
    wide = values.astype(np.float64)
    return np.exp(wide) if side.capabilities.full_laws else wide


def _stepped(side: ServerSide, session: Session, streams: Sequence[int], tokens: Sequence[int]) -> Laws:
    return _law(side, session.step(streams, tokens))


def _apart(one: Laws, other: Laws) -> float:
    """Return the total variation of two laws."""
    return float(np.abs(one - other).sum()) / 2


def _check_law(side: ServerSide) -> str | Unknown:
    with prompted(side) as (session, values):
        law = _law(side, values)
        rows = _stepped(side, session, [session.fork()], tokens_of(side, 1))
    if law.shape != (side.facts.vocabulary,) or rows.shape != (1, side.facts.vocabulary):
        raise OperationError(f"laws have the shapes {law.shape} and {rows.shape}")
    if not side.capabilities.full_laws:
        return Unknown("tokens alone are asked for, and no laws")
    return f"all {side.facts.vocabulary:,} log-probabilities, which sum to {law.sum():.6f} and {rows.sum():.6f}"


def _check_repetition(side: ServerSide) -> str:
    found: list[list[Laws]] = []
    for _ in range(2):
        with prompted(side) as (session, values):
            stream, own = session.fork(), [_law(side, values)]
            own.extend(_stepped(side, session, [stream], [token])[0] for token in tokens_of(side, _STEPS))
            found.append(own)
    apart = max(_apart(one, other) for one, other in zip(*found, strict=True))
    if apart > _CLOSE:
        raise OperationError(f"the same requests gave laws {apart:.2g} apart in total variation")
    return f"laws {apart:.1g} apart in total variation" if apart else "the same bits twice"


def _check_streams(side: ServerSide) -> str:
    tokens = tokens_of(side, _STEPS)
    with prompted(side) as (session, _):
        first = session.fork()
        for token in tokens:
            before = _stepped(side, session, [first], [token])
        copy = session.fork(first)
        both = _stepped(side, session, [first, copy], [tokens[0]] * 2)
        apart = _apart(both[0], both[1])
        if apart > _CLOSE:
            raise OperationError(f"two streams of one history have laws {apart:.2g} apart in total variation")
        unlike = _stepped(side, session, [first, copy], [tokens[1], tokens[2]])
        session.drop(copy)
        again = session.fork()
        for token in tokens:
            after = _stepped(side, session, [again], [token])
        moved = _apart(before[0], after[0])
    if side.capabilities.full_laws and np.array_equal(unlike[0], unlike[1]):
        raise OperationError("two streams that got unlike tokens have the same law")
    if moved > _CLOSE:
        raise OperationError(f"a stream beside others has a law {moved:.2g} away from that which it had alone")
    slots = f"{side.capabilities.most_streams} slots, one token a step" if side.server.slots else "no slots"
    return f"copies {apart:.1g} apart, and {moved:.1g} beside others; {slots}"


def _check_read_back(side: ServerSide) -> str:
    with prompted(side) as (session, _):
        said = {name: value for name, value in session.read_back.items() if value not in (None, "", [])}
    unknown = sorted(name for name, value in side.said.items() if value is None)
    named = ", ".join(f"{name} {value}" for name, value in said.items() if name != "chat_template")
    return f"{named}; unknown: {', '.join(unknown)}" if unknown else named


def _check_bytes(side: ServerSide) -> str | Unknown:
    with prompted(side) as (session, _):
        held = session.prompt_bytes()
    return Unknown("the server does not say: nothing is ruled out by bytes") if held is None else f"{held:,} bytes"


SERVER_PROMISES = (
    Promise("law", "a prompt and one step", _check_law),
    Promise("repetition", "the same requests in two sessions", _check_repetition),
    Promise("streams", "a stream, its copy, unlike tokens, and the same stream beside others", _check_streams),
    Promise("read back", "what the server says of itself before and after", _check_read_back),
    Promise("bytes", "those of the prompt", _check_bytes),
)
