"""The adapter of llama.cpp in this process."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdrift.generator.engines.engine import Capabilities, Session, SideFacts
from kvdrift.generator.llama_cpp.context import MOST_STREAMS, OUTPUT_ROWS, Context
from kvdrift.generator.llama_cpp.library import PACKAGE, library
from kvdrift.generator.llama_cpp.settings import ContextSettings
from kvdrift.generator.llama_cpp.tokenizer import gguf_tokenizer_sha256
from kvdrift.generator.llama_cpp.weights import GgufFacts, Weights, gguf_facts
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import LLAMA_CPP

_ENVIRONMENT: Final = ("LLAMA_", "GGML_", "OMP_", "GOMP_")  # beginnings of the names of variables that move it
_WAITING: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # how long threads wait awake moves nothing

_loaded: weakref.WeakValueDictionary[tuple[Path, str], Weights] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp in this process, through the library of the package xllamacpp; ``digest`` is SHA-256 of a file."""

    digest: Callable[[Path], str]

    def description(self) -> Mapping[str, Any]:
        """Describe the engine, with its library's digest and every environment variable that affects it."""
        found = library()
        return {
            "engine": LLAMA_CPP,
            "library": f"{PACKAGE} {found.version}",
            "build": found.calls.llama_version().decode(),
            "system": found.system,
            "libraries": {found.file.name: self.digest(found.file)},
            "environment": environment(),
        }

    @property
    def fewer_bits(self) -> Mapping[str, Any]:
        """Return settings that store keys and values in 8 bits."""
        return {"type_k": "q8_0", "type_v": "q8_0"}

    def side(self, weights: Path, settings: Mapping[str, Any], where: str) -> LlamaCppSide:
        """Make a side of a GGUF file and settings of ``ContextSettings``."""
        facts, own = gguf_facts(weights), ContextSettings.of(settings, where)
        if facts.unsupported is not None:
            raise InputError(f"{weights}: {facts.architecture}: {facts.unsupported}")
        own.check_heads(facts.key_size, facts.value_size, where)
        return LlamaCppSide(weights, own, facts, self.digest)


@dataclass(frozen=True)
class LlamaCppSide:
    """A GGUF file with settings."""

    file: Path
    settings: ContextSettings
    gguf: GgufFacts
    digest: Callable[[Path], str]

    @functools.cached_property
    def facts(self) -> SideFacts:
        """The file's facts about its model."""
        gguf = self.gguf
        tokenizer = gguf_tokenizer_sha256(self.file) if gguf.has_tokenizer else None
        return SideFacts(gguf.vocabulary, gguf.positions, gguf.eos_tokens, tokenizer)

    @property
    def asked(self) -> Mapping[str, Any]:
        """All settings by name."""
        return self.settings.asked

    @property
    def said(self) -> Mapping[str, Any]:
        """{}, since the file's digest and the settings determine the laws."""
        return {}

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities; rows are not invariant, since sums follow the order of cache entries."""
        return Capabilities(row_invariant=False, most_streams=MOST_STREAMS)

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the GGUF file."""
        return self.digest(self.file)

    def open(self, entries: int) -> Session:
        """Open a context; sides of one file share its weights."""
        key = (self.file, self.weights_sha256)
        weights = _loaded.get(key)
        if weights is None:
            weights = _loaded[key] = Weights(self.file)
        return Context(weights, self.settings, entries)

    def cache_bytes(self, entries: int) -> int:
        """Return roughly how many bytes a context with room for ``entries`` entries takes, with its logits."""
        outputs = OUTPUT_ROWS * self.gguf.vocabulary * 4
        return self.gguf.entry_bytes(self.settings.type_k, self.settings.type_v) * entries + outputs

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
