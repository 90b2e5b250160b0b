"""The adapter of llama.cpp in this process: settings, sides, and contexts with a prompt and streams that continue it.

With flash attention, a stream's logits are the same bits whatever streams are decoded beside it. This rests on three
properties of llama.cpp on a CPU, which ``tests/generator/llama_cpp/test_rows.py`` measures:

- Calls of 2 to 63 rows compute every row in the same way. Calls of one row, and larger calls, use other kernels. So a
  call has at most ``rows`` streams, and a lone stream gets a second row that is thrown away. Weights in K-quants, such
  as Q4_K, are an exception: blocks of rows and the rows left over are computed by different kernels, which a study's
  floor shows.
- Attention skips the entries of other streams, and sums a stream's own entries in their order in the cache. So entries
  must lie in the order of their positions.
- New entries take the first free places. So the places of a closed stream stay taken while other streams are open.

Layers with a sliding window have a cache as large as that of the other layers, in which streams can be forked and
closed; attention reads only the entries within the window. A call ends before a window's entries are overwritten, so
no logits depend on entries outside the window.

The library does not check one condition, which is checked here. Without flash attention it takes keys in blocks of 32
values, and silently computes something else for heads whose size is no multiple of 32.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import os
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, c_int8, c_int32
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.engines.engine import Capabilities, Engine, Room, Session, Side, SideFacts, settings_of
from kvdrift.generator.llama_cpp.gguf import (
    CACHE_TYPES,
    NOT_CAUSAL,
    GgufFacts,
    Weights,
    check_decoded,
    gguf_facts,
    gguf_tokenizer_sha256,
)
from kvdrift.generator.llama_cpp.library import PACKAGE, Batch, ContextParameters, library
from kvdrift.generator.transformer.files.digests import file_sha256
from kvdrift.generator.transformer.files.local_folders import gguf_file, tokenizer_of
from kvdrift.generator.transformer.files.text_ends import ENDS_OF_LLAMA_CPP
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.free_processors import FREE_PROCESSORS
from kvdrift.schema.study import EXACT_TYPES, LLAMA_CPP

_BLOCK = 32  # values that a quantized type has one scale for
_ROWS, _MOST_ROWS = 32, 256


@dataclass(frozen=True)
class ContextSettings:
    """Settings of one side.

    Attributes:
        type_k: The type in which keys are stored, by its name in ``CACHE_TYPES``.
        type_v: The type in which values are stored.
        flash_attention: Whether attention is computed in one pass over the cache.
        ubatch: The most tokens computed at once, of a prompt and of a step.
        threads: The number of threads that compute; 0 is replaced by the number of processors, which units record.
        rows: The most streams that one call advances. From 64 on, flash attention uses other kernels, and a stream's
            logits depend on how many others are beside it.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    ubatch: int = 512
    threads: int = 0
    rows: int = _ROWS

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> ContextSettings:
        """Return the settings, with the values by name that a study file gives; ``where`` is for error lines."""
        bounds = {"ubatch": (1, 1 << 16), "threads": (0, 512), "rows": (1, _MOST_ROWS)}
        made = settings_of(cls, settings, where, "llama.cpp", bounds)
        for name in ("type_k", "type_v"):
            if (kind := getattr(made, name)) not in CACHE_TYPES:
                raise InputError(f"{where}: {name} = '{kind}': no cache type; write one of {', '.join(CACHE_TYPES)}")
        if made.type_v not in EXACT_TYPES and not made.flash_attention:
            raise InputError(f"{where}: type_v = '{made.type_v}': quantized values need flash_attention = true")
        return replace(made, threads=made.threads or len(os.sched_getaffinity(0)))

    @property
    def requested(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The settings as text for an error line."""
        return ", ".join(f"{name} = {value}" for name, value in self.requested.items())

    def check_heads(self, key_size: int, value_size: int, where: str) -> None:
        """Raise an error if the size of a head is no multiple of a quantized type's block of 32 values."""
        for name, kind, size in (("type_k", self.type_k, key_size), ("type_v", self.type_v, value_size)):
            if kind not in EXACT_TYPES and size % _BLOCK:
                raise InputError(
                    f"{where}: {name} = '{kind}': stores blocks of {_BLOCK} values, and the model's heads have "
                    f"{size}; llama.cpp would silently compute something else; choose {', '.join(EXACT_TYPES)}"
                )


T = TypeVar("T")

_SEQUENCES = 256  # of one context, by the library
_PROMPT, _CLOSED, _BESIDE = range(3)  # sequences: the prompt, entries of closed streams, and a lone stream's second row
MOST_STREAMS = _SEQUENCES - 3
OUTPUT_ROWS = 2 * _SEQUENCES
"""Rows of float32 over the vocabulary that a context has room for: its outputs, and the sums that they come from."""
_NO_ROOM = 1  # what llama_decode returns if the cache is full; it has then changed nothing
_PADDING = 256  # of the number of entries, by the library


class Context(Session):
    """One side's cache, with its settings, over weights that several contexts may share.

    It has room for ``entries`` entries of the prompt and all streams.
    """

    def __init__(self, weights: Weights, settings: ContextSettings, entries: int) -> None:
        self.weights, self.settings = weights, settings
        self._library = weights.library
        self._calls = self._library.calls
        room = -(-max(entries, settings.ubatch) // _PADDING) * _PADDING  # a smaller cache has a smaller ubatch
        parameters = self._library.parameters(
            ContextParameters, n_ctx=room, n_batch=max(settings.ubatch, _SEQUENCES), n_ubatch=settings.ubatch,
            n_seq_max=_SEQUENCES, n_outputs_max=_SEQUENCES, n_threads=settings.threads,
            n_threads_batch=settings.threads, type_k=CACHE_TYPES[settings.type_k][0],
            type_v=CACHE_TYPES[settings.type_v][0],
            flash_attn_type=int(settings.flash_attention), kv_unified=True, swa_full=True,
        )  # fmt: skip
        self._library.listen()
        self._handle: int | None = self._calls.llama_init_from_model(weights.handle, parameters)
        if not self._handle:
            raise InputError(f"{weights.file}: llama.cpp opens no context with {settings.words}: "
                             f"{self._library.last_words()}")  # fmt: skip
        self._freed = weakref.finalize(self, _free, self._calls, self._handle, weights)
        self._read = self._read_back()
        self._check_read_back(room)
        self._memory = self._calls.llama_get_memory(self._handle)
        self._vocabulary = weights.facts.vocabulary
        self._lengths: dict[int, int] = {}  # tokens of each open sequence
        self._idle = _streams()

    @property
    def read_back(self) -> Mapping[str, Any]:
        """The settings as the library reports them."""
        return self._read

    def close(self) -> None:
        """Free the cache; the weights stay."""
        self._freed()

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Decode a prompt, in place of an earlier prompt, and return the logits after it, float32 [V]."""
        self._calls.llama_memory_clear(self._memory, True)  # noqa: FBT003 - a C function has no keywords
        self._lengths, self._idle = {_PROMPT: len(tokens)}, _streams()
        at_once = self.settings.ubatch
        for start in range(0, len(tokens), at_once):
            part = tokens[start : start + at_once]
            last = start + len(part) == len(tokens)
            self._decode(
                part, range(start, start + len(part)), [_PROMPT] * len(part), [0] * (len(part) - 1) + [int(last)],
                "a prompt",
            )  # fmt: skip
        return self._logits(len(part) - 1)

    def fork(self, stream: int | None = None) -> int:
        """Open a stream that continues another stream, or the prompt, and shares its entries."""
        source = _PROMPT if stream is None else stream
        new = heapq.heappop(self._idle)
        self._calls.llama_memory_seq_cp(self._memory, source, new, -1, -1)
        self._lengths[new] = self._lengths[source]
        return new

    def drop(self, stream: int) -> None:
        """Close a stream; its entries become free once no stream is open."""
        self._calls.llama_memory_seq_cp(self._memory, stream, _CLOSED, self._lengths[_PROMPT], -1)
        self._remove(stream)
        del self._lengths[stream]
        heapq.heappush(self._idle, stream)
        if not self.open_streams:
            self._remove(_CLOSED)

    def step(self, streams: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append one token to each of some streams, and return the next logits, float32 [streams, V]."""
        distributions = np.empty((len(streams), self._vocabulary), dtype=np.float32)
        at_once = self.settings.rows
        for start in range(0, len(streams), at_once):
            batch = streams[start : start + at_once]
            self._advance(batch, tokens[start : start + at_once])
            for row, stream in enumerate(batch):
                distributions[start + row] = self._logits(row)
                self._lengths[stream] += 1
        return distributions

    def prompt_bytes(self) -> int:
        """Return the bytes of the prompt's state as the library stores it."""
        return int(self._calls.llama_state_seq_get_size(self._handle, _PROMPT))

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        return len(self._lengths) - 1

    def _advance(self, streams: Sequence[int], tokens: Sequence[int]) -> None:
        """Append one token to each of some streams in one call; a lone stream gets a second row, unless rows = 1."""
        positions = [self._lengths[stream] for stream in streams]
        if len(streams) > 1 or self.settings.rows == 1:
            self._decode(tokens, positions, streams, [1] * len(streams), "a step")
        else:
            self._decode([*tokens, *tokens], [*positions, 0], [*streams, _BESIDE], [1, 1], "a step")
            self._remove(_BESIDE)

    def _decode(
        self, tokens: Sequence[int], positions: Sequence[int], streams: Sequence[int], wanted: Sequence[int], what: str
    ) -> None:
        """Decode ``tokens`` at ``positions`` of ``streams``; if the cache is full, first free closed streams' entries.

        All lists have one entry for each row of the call. ``wanted`` is 1 for rows whose logits are needed, else 0.
        ``what`` says in errors what is decoded.
        """
        count = len(tokens)
        each = (c_int32 * count)(*streams)
        sequences = (POINTER(c_int32) * count)(
            *(ctypes.cast(ctypes.byref(each, 4 * row), POINTER(c_int32)) for row in range(count))
        )
        batch = Batch(
            count, (c_int32 * count)(*tokens), None, (c_int32 * count)(*positions), (c_int32 * count)(*[1] * count),
            sequences, (c_int8 * count)(*wanted),
        )  # fmt: skip
        self._library.log_lines.clear()
        if self.settings.flash_attention:  # logits are then the same bits with any number of threads
            threads = FREE_PROCESSORS.threads(self.settings.threads)
            self._calls.llama_set_n_threads(self._handle, threads, threads)
        result = self._calls.llama_decode(self._handle, batch)
        if result == _NO_ROOM:
            self._remove(_CLOSED)
            result = self._calls.llama_decode(self._handle, batch)
        check_decoded(result, what, self._library)

    def _remove(self, sequence: int) -> None:
        """Free the entries that only this sequence has."""
        if not self._calls.llama_memory_seq_rm(self._memory, sequence, -1, -1):
            raise OperationError(f"llama.cpp: entries cannot be freed: {self._library.last_words()}")

    def _logits(self, row: int) -> NDArray[np.float32]:
        """Copy the logits of a row of the last call, float32 [V]."""
        address = self._calls.llama_get_logits_ith(self._handle, row)
        if not address:
            raise OperationError(f"llama.cpp: a row has no logits: {self._library.last_words()}")
        return np.ctypeslib.as_array((ctypes.c_float * self._vocabulary).from_address(address)).copy()

    def _read_back(self) -> dict[str, Any]:
        """Return the library's report about the context, from its functions and from its log."""
        log, calls = self._library.log_text(), self._calls
        kinds = re.findall(r"K \((\w+)\):.*V \((\w+)\):", log)  # layers with windows have a second cache
        flash = re.search(r"flash_attn\s*= (\w+)", log)
        unified = re.search(r"kv_unified\s*= (\w+)", log)
        causal = re.search(r"causal_attn\s*= (\d)", log)
        rotated = {side: re.findall(rf"n_rot_{side} = (\d+)", log) for side in "kv"}
        return {
            "type_k": _in_all(kind for kind, _ in kinds),
            "type_v": _in_all(kind for _, kind in kinds),
            "causal": causal and causal[1] == "1",
            "window": calls.llama_model_n_swa(self.weights.handle),
            "flash_attention": flash and flash[1] == "enabled",
            "unified": unified and unified[1] == "true",
            "ubatch": calls.llama_n_ubatch(self._handle),
            "threads": calls.llama_n_threads(self._handle),
            "threads_prefill": calls.llama_n_threads_batch(self._handle),
            **{f"rotated_{side}": _in_all(map(int, flags)) for side, flags in rotated.items()},
        }

    def _check_read_back(self, room: int) -> None:
        """Raise an error if the context's settings differ from the requested settings."""
        if not self._read["causal"]:
            raise InputError(f"{self.weights.file}: {NOT_CAUSAL}")
        requested = {**self.settings.requested, "unified": True, "threads_prefill": self.settings.threads}
        requested.pop("rows")  # by how many calls are made, which the library does not know
        for name, value in requested.items():
            if (actual := self._read[name]) != value:
                raise InputError(f"{self.weights.file}: llama.cpp has {name} = {actual}, and {value} was requested")
        if (entries := self._calls.llama_n_ctx(self._handle)) < room:
            raise InputError(f"{self.weights.file}: llama.cpp has a cache of {entries} entries; {room} are needed")


def _in_all(values: Iterable[T]) -> T | list[T] | None:
    """Return the value that all caches of a context have; the list of values if they differ, None without caches."""
    each = list(values)
    return next(iter(each), None) if len(set(each)) < 2 else each


def _streams() -> list[int]:
    """Return the sequence ids that streams may use, ascending."""
    return list(range(_SEQUENCES - MOST_STREAMS, _SEQUENCES))


def _free(calls: Any, handle: int, _weights: Weights) -> None:  # the weights outlive their contexts
    calls.llama_free(handle)


_ENVIRONMENT: Final = ("LLAMA_", "GGML_", "OMP_", "GOMP_")  # beginnings of names of variables that change results
_WAITING: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # how long idle threads stay awake, which changes no result

_loaded_weights: weakref.WeakValueDictionary[tuple[Path, str], Weights] = weakref.WeakValueDictionary()


class LlamaCpp(Engine):
    """llama.cpp in this process, through the library of the package xllamacpp; weights are GGUF files."""

    ends = ENDS_OF_LLAMA_CPP
    sample = "kvdrift/tiny-F32.gguf"
    fewer_bits: ClassVar[Mapping[str, Any]] = {"type_k": "q8_0", "type_v": "q8_0"}
    of_cache = ("type_k", "type_v")

    def location(self, written: str, folder: Path | None, key: str) -> str:  # noqa: ARG002 - side() says what is wrong
        """Return the path of the GGUF file ``written``: one of the embedded model's, or one relative to ``folder``."""
        return str(gguf_file(written, folder))

    def tokenizer(self, location: str) -> str:
        """Return the file itself; for files of the embedded model, which lack a tokenizer, that model's tokenizer."""
        return tokenizer_of(location)

    def description(self) -> Mapping[str, Any]:
        """Describe the engine, with its library's digest and every environment variable that affects it."""
        loaded = library()
        return {
            "engine": LLAMA_CPP,
            "library": f"{PACKAGE} {loaded.version}",
            "build": loaded.calls.llama_version().decode(),
            "system": loaded.system,
            "libraries": {loaded.file.name: file_sha256(loaded.file)},
            "environment": environment(),
        }

    def side(self, location: str, settings: Mapping[str, Any], where: str, _: Path | None = None) -> LlamaCppSide:
        """Make a side of a GGUF file and settings of ``ContextSettings``."""
        file = Path(location)
        facts, context_settings = gguf_facts(file), ContextSettings.of(settings, where)
        if facts.unsupported is not None:
            raise InputError(f"{file}: {facts.architecture}: {facts.unsupported}")
        context_settings.check_heads(facts.key_size, facts.value_size, where)
        return LlamaCppSide(file, context_settings, facts)


@dataclass(frozen=True)
class LlamaCppSide(Side):
    """A side of llama.cpp: a GGUF file with settings."""

    file: Path
    settings: ContextSettings
    gguf: GgufFacts

    @functools.cached_property
    def facts(self) -> SideFacts:
        """The file's facts about its model."""
        gguf = self.gguf
        tokenizer = gguf_tokenizer_sha256(self.file) if gguf.has_tokenizer else None
        return SideFacts(gguf.vocabulary, gguf.positions, gguf.eos_tokens, tokenizer)

    @property
    def requested(self) -> Mapping[str, Any]:
        """All settings by name."""
        return self.settings.requested

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities: without ``row_invariant``, since sums follow the order of entries in the cache."""
        return Capabilities(row_invariant=False, most_streams=MOST_STREAMS)

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the GGUF file."""
        return file_sha256(self.file)

    def open(self, room: Room) -> Session:
        """Open a context; sides of one file share its weights."""
        key = (self.file, self.weights_sha256)
        weights = _loaded_weights.get(key)
        if weights is None:
            weights = _loaded_weights[key] = Weights(self.file)
        return Context(weights, self.settings, room.entries)

    def cache_bytes(self, room: Room) -> int:
        """Return roughly how many bytes a context with that room takes, with its logits."""
        outputs = OUTPUT_ROWS * self.gguf.vocabulary * 4
        return self.gguf.entry_bytes(self.settings.type_k, self.settings.type_v) * room.entries + outputs

    def weight_bytes(self) -> int:
        """Return roughly how many bytes the weights take in memory: the size of the file."""
        return self.file.stat().st_size


def environment() -> dict[str, str]:
    """Return the environment variables that affect llama.cpp, by name."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT) and name not in _WAITING
    }
