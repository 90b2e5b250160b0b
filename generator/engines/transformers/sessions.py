"""A side's cache: a prompt, and streams that continue it in rows of batched caches.

Streams of equal length are rows of one cache, as long as rows do not depend on each other. A stream that is forked
stands for the same row until the next step, in which each stream gets a row of its own. One by one, every stream has a
cache and a press of its own, and both are copied whole.

Prefill and decoding follow kvpress' pipeline and transformers' ``generate``: the whole prompt in one call, under the
press; then one token a call, at the true positions or, after keys were rotated anew, at those after the kept entries.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from kvdrift.generator.attention.parts import attention_modules
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.engines.engine import Session
from kvdrift.generator.engines.transformers import presses
from kvdrift.generator.engines.transformers.entries import (
    Masks,
    held_bytes,
    kept_count,
    kept_positions,
    recorded,
    rows_of,
    shared_copy,
    whole_copy,
)
from kvdrift.generator.engines.transformers.growing import grown
from kvdrift.generator.transformer.memory import is_memory_shortage
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, failure_in
from kvdrift.schema.log_levels import raised_level


@dataclass(frozen=True)
class Tools:
    """The parts of a side that its sessions use.

    Attributes:
        where: The beginning of error lines, such as the name of an action.
        network: The side's twin of the network.
        attention: The name of the attention implementation.
        make_cache: Makes an empty cache; its argument is the most tokens of a stream, prompt included.
        make_press: Makes the press; None without a press.
        patched: Returns a context in which the side's patch acts.
        files: The files of the user's modules, for the lines of errors.
        text: The side's settings as text, from which random presses are seeded.
    """

    where: str
    network: Any
    attention: str
    make_cache: Callable[[int], Any]
    make_press: Callable[[], Any] | None
    patched: Callable[[], AbstractContextManager[Any]]
    files: Sequence[str]
    text: str


@dataclass(eq=False)
class _Rows:
    """Streams of equal length: a cache with a row for each, of which several streams may be the same row."""

    cache: Any
    press: Any | None  # that acts while decoding; there is one row then
    masks: Masks
    length: int  # the tokens of each stream, prompt included
    shift: int  # how much less than its true position the position of a token is
    texts: list[bytes]  # a digest of the tokens of each row
    members: dict[int, int]  # the row of each stream

    def take(self, rows: Sequence[int], *, whole: bool) -> _Rows:
        """Return a copy whose row i is row ``rows[i]``; if ``whole``, of the one row with all that belongs to it."""
        if whole:
            cache = whole_copy(self.cache)
        else:
            cache = shared_copy(self.cache)
            if type(cache) is DynamicCache:
                grown(cache, rows)
            else:
                cache.reorder_cache(torch.tensor(rows))
        texts = [self.texts[row] for row in rows]
        masks = rows_of(self.masks, rows)
        return _Rows(cache, copy.deepcopy(self.press), masks, self.length, self.shift, texts, {})


class TransformersSession(Session):
    """One side's cache with its press; ``most_tokens`` is how many tokens a stream may have, prompt included.

    A call advances at most ``rows`` streams. If ``rows`` is 1, torch computes in one thread: the number of threads can
    change the last bits of a sum.
    """

    def __init__(self, tools: Tools, rows: int, most_tokens: int, note: str = "") -> None:
        self._tools, self._rows, self._most, self._note = tools, rows, most_tokens, note
        self._modules = [*attention_modules(tools.network).values()]
        self._of: dict[int, _Rows] = {}
        self._prompt: _Rows | None = None
        self._next = 0
        self._bytes: int | None = None
        self._peak: int | None = None
        self._kept: KeptEntries | None = None
        self._count: int | None = None

    @property
    def read_back(self) -> Mapping[str, Any]:
        """The network and the cache as they are, and how many streams a call advances."""
        network = self._tools.network
        cache: Any = None if self._prompt is None else self._prompt.cache
        return {
            "model": type(network).__name__,
            "attention": network.config._attn_implementation,  # noqa: SLF001 - transformers has no other name for it
            "dtype": str(network.dtype).removeprefix("torch."),
            "cache": type(cache).__name__,
            "layers": sorted({type(layer).__name__ for layer in cache.layers}) if cache is not None else [],
            "rows": self._rows,
            **({"note": self._note} if self._note else {}),
        }

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Process a prompt under the press, in place of an earlier prompt, and return the logits after it, [V]."""
        tools, entries = self._tools, len(tokens)
        self._of, self._next = {}, 0
        ids = torch.tensor([list(tokens)], device=tools.network.device)
        text = hashlib.blake2b(repr([tools.text, *tokens]).encode(), digest_size=8).digest()
        with self._computing(), self._seeded(text):
            cache = tools.make_cache(self._most)
            press = None if tools.make_press is None else tools.make_press()
            self._masked([None] * len(self._modules))
            acting = nullcontext() if press is None or not presses.prefills(press) else press(tools.network)
            with recorded(cache) as computed, acting:
                logits = self._logits(ids, cache, None, torch.arange(entries, device=ids.device))
            masks = self._masks()
            self._check_masks(masks)
            renumbered = press is not None and presses.renumbers(press)
            shift = entries - cache.get_seq_length() if renumbered else 0
            deciding = press if press is not None and presses.decodes(press) else None
            self._prompt = _Rows(cache, deciding, masks, entries, shift, [text], {})
            self._bytes = held_bytes(cache, masks)
            self._peak = self._bytes if deciding is not None else None
            self._count = kept_count(cache, entries, masks)
            self._kept = kept_positions(computed, cache, entries, masks)
            after: NDArray[np.float32] = logits[0]
        return after

    def fork(self, stream: int | None = None) -> int:
        """Open a stream that continues another stream, or the prompt; return its number."""
        rows = self._prompt if stream is None else self._of[stream]
        if rows is None:
            raise OperationError(f"{self._tools.where}: no prompt was processed; call prefill first")
        self._next += 1
        rows.members[self._next] = 0 if stream is None else rows.members[stream]
        self._of[self._next] = rows
        return self._next

    def drop(self, stream: int) -> None:
        """Close a stream."""
        del self._of.pop(stream).members[stream]

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams, and return the next logits, [streams, V]."""
        with self._computing():
            parts = [
                (places, self._stepped(rows, [tokens[place] for place in places]))
                for rows, places in self._grouped(streams)
            ]
        logits = np.empty((len(streams), parts[0][1].shape[1]), dtype=np.float32)
        for places, stepped in parts:
            logits[places] = stepped
        return logits

    def prompt_bytes(self) -> int | None:
        """Return the bytes of the prompt's cache, without those of masked entries and of channels of zeros in keys."""
        return self._bytes

    def peak_bytes(self) -> int | None:
        """Return the most bytes that a stream's cache had, for a press that acts while decoding; else None."""
        return self._peak

    def kept_entries(self) -> int | None:
        """Return the mean number of the prompt's entries that a KV head of a layer keeps; None if it cannot be told."""
        return self._count

    def kept(self) -> KeptEntries | None:
        """Return which entries of the prompt the cache keeps after prefill; None if they cannot be told."""
        return self._kept

    def close(self) -> None:
        """Free the cache."""
        self._of, self._prompt = {}, None

    def _grouped(self, streams: Sequence[int]) -> Iterator[tuple[_Rows, list[int]]]:
        """Yield the rows to advance together, each with the places in ``streams`` of its rows, in their order."""
        by_rows: dict[int, list[int]] = {}
        for place, stream in enumerate(streams):
            by_rows.setdefault(id(self._of[stream]), []).append(place)
        for places in by_rows.values():
            rows = self._of[streams[places[0]]]
            places.sort(key=lambda place: rows.members[streams[place]])
            parts = -(-len(places) // self._rows)
            for part in range(parts):
                chosen = places[part * len(places) // parts : (part + 1) * len(places) // parts]
                yield self._with_rows(rows, [streams[place] for place in chosen]), chosen

    def _with_rows(self, rows: _Rows, streams: Sequence[int]) -> _Rows:
        """Return the rows of exactly these streams, in this order: ``rows`` itself if it has no others, or a copy."""
        wanted = [rows.members[stream] for stream in streams]
        if rows is not self._prompt and len(rows.members) == len(streams) and wanted == list(range(len(rows.texts))):
            return rows
        taken = rows.take(wanted, whole=self._rows == 1)
        for row, stream in enumerate(streams):
            del rows.members[stream]
            taken.members[stream] = row
            self._of[stream] = taken
        return taken

    def _stepped(self, rows: _Rows, tokens: Sequence[int]) -> NDArray[np.float32]:
        network = self._tools.network
        ids = torch.tensor([[token] for token in tokens], device=network.device)
        position = torch.full_like(ids, rows.length - rows.shift)
        place = torch.tensor([rows.length], device=ids.device)
        rows.texts = [
            hashlib.blake2b(text + token.to_bytes(8, "little"), digest_size=8).digest()
            for text, token in zip(rows.texts, tokens, strict=True)
        ]
        self._masked(rows.masks)
        with ExitStack() as acting:
            if rows.press is not None:
                acting.enter_context(self._seeded(rows.texts[0]))
                acting.enter_context(rows.press(network))
            logits = self._logits(ids, rows.cache, position, place)
            if rows.press is not None:
                rows.press = shared_copy(rows.press)  # leaving the press' context resets its state
        rows.masks = self._masks()
        rows.length += 1
        if rows.press is not None:
            self._check_masks(rows.masks)
            held = held_bytes(rows.cache, rows.masks)
            self._peak = None if held is None or self._peak is None else max(self._peak, held)
        return logits

    def _logits(self, ids: Tensor, cache: Any, position: Tensor | None, place: Tensor) -> NDArray[np.float32]:
        """Run the network on ``ids``, int64 [rows, tokens], and return the last logits, float32 [rows, V]."""
        tools = self._tools
        hooked = {} if tools.make_press is None else {"cache_position": place}  # hooks of kvpress ask for it
        masking = presses.masking(tools.attention) if tools.make_press is not None else nullcontext()
        with tools.patched(), masking:
            output = tools.network(
                input_ids=ids, past_key_values=cache, position_ids=position, use_cache=True, logits_to_keep=1, **hooked
            )
        logits: NDArray[np.float32] = output.logits[:, -1].float().cpu().numpy()
        return logits

    def _masked(self, masks: Masks) -> None:
        for module, mask in zip(self._modules, masks, strict=True):
            module.masked_key_indices = mask

    def _masks(self) -> list[list[Tensor] | None]:
        masks = [getattr(module, "masked_key_indices", None) for module in self._modules]
        return [None if mask is None else list(mask) for mask in masks]

    def _check_masks(self, masks: Masks) -> None:
        if self._tools.attention == "eager" and any(mask is not None and len(mask[0]) for mask in masks):
            raise InputError(
                f"{self._tools.where}: the press masks entries, which kvpress cannot do in eager attention; write "
                'settings = { attention = "sdpa" } under [model]'
            )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute without gradients; an exception of a press, cache or patch becomes one line with its place."""
        try:
            with torch.no_grad(), torch_threads(1 if self._rows == 1 else None), raised_level("kvpress", logging.ERROR):
                yield
        except KvdriftError:
            raise
        except Exception as error:
            if is_memory_shortage(error):
                raise
            raise OperationError(f"{self._tools.where}: {failure_in(error, self._tools.files)}") from error

    @contextmanager
    def _seeded(self, text: bytes) -> Iterator[None]:
        """Seed torch by a text inside the block, and restore its state afterwards."""
        network = self._tools.network
        with torch.random.fork_rng([network.device] if network.device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(text, "big") >> 1)
            yield
