"""A new study file for an engine: a GGUF file, and an action for each cache type and for each file of other weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvdrift.generator.engines.llama_cpp import ContextSettings
from kvdrift.generator.engines.registry import ENGINES
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_GGUF, EMBEDDED_ID, GGUF, gguf_file
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import HTTP, KERNEL_FLOOR_ACTION, LLAMA_CPP, ModelSection
from kvdrift.study_files.commented import Table

_EMBEDDED = "kvdrift/tiny-F32.gguf"
_CACHE_TYPES = ("q8_0", "q4_0")
_REFERENCE: Table = {"type_k": "f16", "type_v": "f16"}


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its options."""

    engine: str  # The engine's name
    gguf: Path | None  # The file of the reference's weights; None for the embedded model's
    option: str  # The option that names the file
    cache_types: Sequence[str]  # For each action the type of its keys and values; ``K/V`` names two types
    weights: Sequence[Path]  # For each further action the file of its weights

    @property
    def file(self) -> Path:
        """The file of the reference's weights on this machine."""
        return gguf_file(_EMBEDDED if self.gguf is None else str(self.gguf))

    @property
    def embedded(self) -> bool:
        """Whether the weights are those of the embedded model, which cannot read text."""
        return self.file.parent == EMBEDDED_GGUF

    def model(self, folder: Path) -> Table:
        """Return the values of ``[model]`` for a study file in ``folder``."""
        file = _EMBEDDED if self.gguf is None else _named(self.gguf, folder, self.option)
        return {"engine": self.engine, "id": file, "settings": _REFERENCE}

    def actions(self, folder: Path) -> list[Table]:
        """Return the values of each action: those of cache types, then those of weights, then the kernel floor."""
        kinds = self.cache_types or ([] if self.weights else _CACHE_TYPES)
        made: list[Table] = [{"name": "cache-" + kind.replace("/", "-"), "settings": _types(kind)} for kind in kinds]
        made += [{"name": file.stem, "weights": _named(file, folder, "--weights")} for file in self.weights]
        kernel = ModelSection(engine=self.engine, id=_EMBEDDED, settings=_REFERENCE).other_kernel
        return [*made, {"name": KERNEL_FLOOR_ACTION, "settings": kernel}]


def engine_choice(
    model: str, engine: str | None, gguf: Path | None, cache_types: str | None, weights: Sequence[Path]
) -> EngineChoice | None:
    """Return the choice that the options of ``kvdrift init`` make; None without an engine.

    A GGUF file, named by ``--model`` or ``--gguf``, is for llama.cpp.
    """
    by_model = model.endswith(GGUF)
    if engine is None and gguf is None and not by_model:
        given = {"--cache-types": cache_types is not None, "--weights": bool(weights)}
        if option := next((name for name, there in given.items() if there), None):
            raise InputError(f"{option}: belongs to an engine; add --model FILE{GGUF}, or --engine {LLAMA_CPP}")
        return None
    if engine in {HTTP, *ENGINES} - {LLAMA_CPP}:
        raise InputError(f"--engine {engine}: its study is written by hand; docs/engines.md has one to start from")
    if engine not in (None, LLAMA_CPP):
        raise InputError(f"--engine {engine}: {nearest(engine, ENGINES)}")
    if gguf is not None and model != EMBEDDED_ID:
        raise InputError(f"--model {model}: --gguf names the model already; leave one of the two out")
    if gguf is not None and gguf.suffix != GGUF:
        raise InputError(f"--gguf {gguf}: a GGUF file is named *{GGUF}")
    if gguf is None and not by_model and model != EMBEDDED_ID:
        raise InputError(f"--model {model}: engine {LLAMA_CPP} reads a GGUF file, *{GGUF}")
    kinds = [] if cache_types is None else [kind.strip() for kind in cache_types.split(",") if kind.strip()]
    for kind in kinds:
        ContextSettings.of(_types(kind), f"--cache-types {kind}")
    return EngineChoice(
        LLAMA_CPP, Path(model) if by_model else gguf, "--model" if by_model else "--gguf", kinds, weights
    )


def _types(kind: str) -> Table:
    """Return the settings for one cache type, or for two as in ``q8_0/q4_0``."""
    keys, _, values = kind.partition("/")
    return {"type_k": keys, "type_v": values or keys}


def _named(file: Path, folder: Path, option: str) -> str:
    """Return a file's path relative to the study file's folder."""
    if gguf_file(str(file)).parent == EMBEDDED_GGUF:
        return str(file)
    if not file.expanduser().is_file():
        raise InputError(f"{option} {file}: no such file")
    return os.path.relpath(file.expanduser().absolute(), folder)
