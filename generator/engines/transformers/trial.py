"""Trials of a side before its first prompt: what it keeps outside its cache, and whether rows depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Session
from kvdrift.generator.engines.transformers.sessions import Tools, TransformersSession
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.schema.errors import InputError, OperationError, failure_in

_LENGTHS = (160, 1024)  # tokens of a trial's prompt; the second if a press finds the first too short
_STEPS, _FORK = 4, 2  # tokens of a stream, and after how many of these it is forked
_CLOSE = 1e-3  # of the largest logit: what batches may change; 2e-6 was the most for rows that do not depend on others
_ROUNDINGS = 16  # or so many times the relative error of the dtype, if that is more
_UPDATES = 300  # tokens that a layer stores in the trial of a cache: transformers quantizes anew after 128


def independent_rows(tools: Tools, vocabulary: int, positions: int, rows: int) -> tuple[int, str]:
    """Return how many streams a call may advance, at most ``rows``, and why these are fewer; "" if they are not.

    Raises:
        InputError: A stream depends on another stream although each has a cache of its own.
        OperationError: The press, the cache or the patch fails.
    """
    alone = _streams(tools, vocabulary, positions, 1)
    if not all(np.array_equal(alone[0], other) for other in alone[1:]):
        worst = max(float(np.abs(alone[0] - other).max()) for other in alone[1:])
        raise InputError(
            f"{tools.where}: a stream and its copy, or a stream alone and beside another, have logits that differ by "
            f"{worst:.2g}, although each has a cache of its own; keep the state of a cache or patch in the cache"
        )
    if rows == 1:
        return 1, ""
    try:
        together = _streams(tools, vocabulary, positions, rows)
    except OperationError as error:
        return 1, f"one stream a call, since several fail ({error})"
    largest = float(np.abs(alone[0]).max())
    apart = max(float(np.abs(alone[0] - other).max()) for other in together) / largest
    close = max(_CLOSE, _ROUNDINGS * torch.finfo(tools.network.dtype).eps)
    if apart > close:
        return 1, f"one stream a call, since others beside a stream change its logits by {apart:.2g} of the largest"
    try:
        moved = _cache_rows(tools)
    except Exception as error:  # noqa: BLE001 - a user's cache may need more than one layer's keys and values
        return 1, f"one stream a call, since the cache cannot be tried by itself ({failure_in(error, tools.files)})"
    if moved > close:
        return 1, f"one stream a call, since others beside a stream change its stored entries by {moved:.2g}"
    return rows, ""


def effect(side: Session, reference: Session, prompt: Sequence[int], text: Sequence[int]) -> str:
    """Return in words what a side does beside a reference: its entries, its bytes, and how far its distributions move.

    Both sessions process ``prompt`` and then the same ``text``.
    """
    moved, streams = 0.0, []
    for session in (side, reference):
        session.prefill(prompt)
        streams.append(session.fork())
    for token in text:
        ours, theirs = (
            torch.from_numpy(session.step([stream], [token])[0]).softmax(-1)
            for session, stream in zip((side, reference), streams, strict=True)
        )
        moved = max(moved, float((ours - theirs).abs().sum()) / 2)
    kept, held, whole = side.kept_entries(), side.peak_bytes() or side.prompt_bytes(), reference.prompt_bytes()
    entries = "an unknown number" if kept is None else str(kept)
    share = "an unknown share" if held is None or not whole else f"{held / whole:.0%}"
    return (
        f"{entries} of {len(prompt)} entries, {share} of the bytes; distributions of {len(text)} tokens move by up to "
        f"{moved:.2g} in total variation"
    )


def _streams(tools: Tools, vocabulary: int, positions: int, rows: int) -> list[NDArray[np.float32]]:
    """Return the last logits of a stream alone, of the same stream beside others, and of a copy that was forked."""
    short, long = (min(length, positions - _STEPS) for length in _LENGTHS)
    with suppress(OperationError):
        return _of_length(tools, vocabulary, short, rows)
    return _of_length(tools, vocabulary, long, rows)


def _of_length(tools: Tools, vocabulary: int, length: int, rows: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(11)
    prompt = random.integers(0, vocabulary, length).tolist()
    own, other = random.integers(0, vocabulary, (2, _STEPS)).tolist()
    session = TransformersSession(tools, rows, length + _STEPS)
    session.prefill(prompt)
    alone = session.fork()
    for token in own:
        last = session.step([alone], [token])[0]
    session.drop(alone)
    stream, beside = session.fork(), session.fork()
    copied = None
    for number, token in enumerate(own):
        if number == _FORK:
            copied = session.fork(stream)
        streams = [beside, stream, *([] if copied is None else [copied])]
        logits = session.step(streams, [other[number], token, token][: len(streams)])
    session.close()
    return [last, *logits[1:]]


def _cache_rows(tools: Tools) -> float:
    """Return by how much a layer's stored entries change if another row is beside, relative to the largest entry.

    Many tokens are stored, so that a cache that quantizes what it has gathered does so.
    """
    network = tools.network
    shape = ModelShape.of(network.config.to_dict(), str(network.dtype).removeprefix("torch."))
    sizes = (2, 2, shape.kv_heads, _UPDATES, shape.head_size)  # keys and values, rows, heads, tokens, channels
    states = torch.randn(sizes, generator=torch.Generator().manual_seed(11))
    states = states.to(network.device, network.dtype)
    read = []
    for rows in (1, 2):
        cache = tools.make_cache(2 * _UPDATES)
        cache.update(states[0, :1, :, :64], states[1, :1, :, :64], 0)
        cache.reorder_cache(torch.zeros(rows, dtype=torch.int64, device=network.device))
        for place in range(64, _UPDATES):
            stored = cache.update(states[0, :rows, :, place : place + 1], states[1, :rows, :, place : place + 1], 0)
        read.append([part[0] for part in stored])
    apart = max(float((one - two).abs().max()) for one, two in zip(*read, strict=True))
    return apart / float(states.abs().max())
