"""The adapter of transformers: models, caches, presses of kvpress and patches as they are, each side with settings.

A network is loaded once for all sides that compute with the same weights. Each side has a twin of it, with modules of
its own over these weights: hooks, masks and patches of a side are put on its twin, so other sides keep theirs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import torch

from kvdrift.generator.engines.engine import Capabilities, Engine, Room, Session, SideFacts, settings_of
from kvdrift.generator.engines.engine import Side as SideProtocol
from kvdrift.generator.engines.transformers import presses
from kvdrift.generator.engines.transformers.expressions import Call, Library, code_of, files_of, parse
from kvdrift.generator.engines.transformers.sessions import Tools, TransformersSession
from kvdrift.generator.engines.transformers.trial import independent_rows
from kvdrift.generator.selectors.custom.loading import load_module
from kvdrift.generator.transformer.files.configuration import (
    causal_class,
    library,
    position_limit,
    read_configuration,
    vocabulary_size,
)
from kvdrift.generator.transformer.files.digests import file_sha256
from kvdrift.generator.transformer.files.fingerprints import model_identity, tokenizer_sha256
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID, stored_bytes
from kvdrift.generator.transformer.files.text_ends import model_ends
from kvdrift.generator.transformer.loading import load_network
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.generator.transformer.model_checks import check_placement, checked_configuration
from kvdrift.schema.errors import InputError, failure_in, installing, nearest
from kvdrift.schema.study import TRANSFORMERS

_MOST_ROWS = 32
_MOST_STREAMS = 32  # of a session: each stream holds a copy of the prompt's entries
_PROBE = (3, 5, 8, 13, 21, 34, 55, 89)  # tokens on which a patch must not move the reference
_loaded: weakref.WeakValueDictionary[tuple[str, ...], Any] = weakref.WeakValueDictionary()  # networks
_QUANTIZERS = {"quanto": "optimum-quanto", "hqq": "hqq"}  # packages of QuantizedCache's backends


@dataclass(frozen=True)
class SideSettings:
    """Settings of one side.

    Attributes:
        press: A press of kvpress as an expression, as in "SnapKVPress(compression_ratio=0.5)"; "" for none.
        cache: A cache as an expression, as in "QuantizedCache(backend='quanto', nbits=4)".
        patch: A function of the model, "module:function", that changes the model or returns a context in which the
            model is changed; "" for none.
        attention: The implementation of attention, by its name in transformers.
        dtype: The floating-point type of weights and computation.
        device: The device that computes, by its name in torch.
        rows: The most streams that a call advances, if a trial shows that they do not depend on each other.
    """

    press: str = ""
    cache: str = "DynamicCache"
    patch: str = ""
    attention: str = "sdpa"
    dtype: str = "float32"
    device: str = "cpu"
    rows: int = _MOST_ROWS


class Transformers(Engine):
    """transformers in this process; weights are a folder, a Hugging Face id or a GGUF file."""

    ends = "the model"
    sample = EMBEDDED_ID
    fewer_bits: ClassVar[Mapping[str, Any]] = {"dtype": "bfloat16"}
    of_cache = ("press", "cache", "patch", "dtype")

    def description(self) -> Mapping[str, Any]:
        """Describe the engine: its libraries and their versions."""
        return {
            "engine": TRANSFORMERS,
            "library": f"transformers {version('transformers')}",
            "build": f"torch {torch.__version__}",
            "environment": {},
        }

    def side(self, location: str, settings: Mapping[str, Any], where: str, folder: Path | None = None) -> Side:
        """Make a side of the weights at ``location`` and settings of ``SideSettings``; no weights are loaded."""
        made = settings_of(SideSettings, settings, where, TRANSFORMERS, {"rows": (1, _MOST_ROWS)})
        try:
            check_placement(made.dtype, made.device, None)
        except InputError as error:
            raise InputError(f"{where}: {str(error).removeprefix('model.')}") from None
        press = None if not made.press else parse(made.press, where, press_library(), folder)
        for call in [] if press is None else press.calls:
            if (reason := presses.refusal(call.kind)) is not None:
                raise InputError(f"{where}: press = '{made.press}': {call.kind.__name__} {reason}")
        if press is not None and _model_shape(location, made.dtype).windows:
            raise InputError(
                f"{where}: press = '{made.press}': this model has layers with a window, whose entries kvpress would "
                "take for those of the whole prompt; take a model whose layers all attend to the whole prompt"
            )
        cache = parse(made.cache, where, cache_library(), folder)
        _check_quantizer(cache, f"{where}: cache = '{made.cache}'")
        patch = None if not made.patch else _function(made.patch, f"{where}: patch = '{made.patch}'", folder)
        return Side(location, made, press, cache, patch, where)

    def check_beside(self, reference: Any, side: Any, where: str) -> None:
        """Refuse a side whose press, cache or patch is compared with a reference that computes in another way."""
        ours, theirs = reference.settings, side.settings
        acting = [name for name in ("press", "cache", "patch") if getattr(ours, name) != getattr(theirs, name)]
        for name in ("attention", "dtype", "device") if acting else ():
            if getattr(ours, name) != getattr(theirs, name):
                raise InputError(
                    f"{where}: {name} = '{getattr(theirs, name)}': both sides must compute alike, so that only the "
                    f'{acting[0]} differs; write settings = {{ {name} = "{getattr(theirs, name)}" }} under [model]'
                )


@dataclass(frozen=True, eq=False)
class Side(SideProtocol):
    """A side of transformers: weights with settings, and with the press, cache and patch that the settings name."""

    location: str
    settings: SideSettings
    press: Call | None
    cache: Call
    patch: Callable[[Any], Any] | None
    where: str

    @functools.cached_property
    def facts(self) -> SideFacts:
        """The facts that the files of the weights state about their model."""
        named = tuple(dict.fromkeys(token for token, _ in model_ends(self.location)))
        tokenizer = tokenizer_sha256(self.location)
        return SideFacts(vocabulary_size(self.location), position_limit(self.location), named, tokenizer)

    @property
    def requested(self) -> Mapping[str, Any]:
        """All settings by name."""
        return asdict(self.settings)

    @functools.cached_property
    def code(self) -> Mapping[str, str]:
        """The press and the cache with all options, and the code that defines them, the patch and the model."""
        model = getattr(library(), causal_class(read_configuration(self.location, None)) or "")
        code = {"cache": self.cache.text, model.__module__: file_sha256(Path(inspect.getfile(model)))}
        if self.press is not None:
            code["press"] = self.press.text
        for kind in self._named:
            code |= code_of(kind)
        if (package := _quantizer(self.cache)) is not None:
            code[package] = version(package)
        return dict(sorted(code.items()))

    @property
    def capabilities(self) -> Capabilities:
        """The side's capabilities: ``row_invariant`` if streams are decoded one by one."""
        return Capabilities(row_invariant=self.settings.rows == 1, most_streams=_MOST_STREAMS, grows=True)

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights' files; a model that is not on this machine is loaded first."""
        found = model_identity(self.location).weights_sha256
        if found is None:
            self._network  # noqa: B018 - downloads the files
            found = model_identity(self.location).weights_sha256
        return found

    def load(self) -> str:
        """Load the weights, try the press, cache and patch, and return why streams are decoded one by one, or ""."""
        return self._trial[1]

    def open(self, room: Room) -> Session:
        """Open a session; the first one does what ``load`` does."""
        rows, note = self._trial
        return TransformersSession(self._tools, rows, room.prompt + room.horizon, note)

    def cache_bytes(self, room: Room) -> int:
        """Return roughly how many bytes streams take that each have a copy of the prompt's entries."""
        entry = _model_shape(self.location, self.settings.dtype).entry_bytes
        return entry * (room.prompt + room.streams * (room.prompt + room.horizon))

    def weight_bytes(self) -> int:
        """Return roughly how many bytes the weights take in memory."""
        return stored_bytes(self.location) or 0

    @property
    def _named(self) -> list[Any]:
        """The classes of the press and the cache, and the function of the patch."""
        calls = [call for outer in (self.press, self.cache) if outer is not None for call in outer.calls]
        return [*(call.kind for call in calls), *([] if self.patch is None else [self.patch])]

    @functools.cached_property
    def _network(self) -> Any:
        made = self.settings
        key = (self.location, made.dtype, made.attention, made.device)
        found = _loaded.get(key)
        if found is None:
            config = checked_configuration(self.location, made.dtype, None, made.device, None)
            found = load_network(self.location, None, made.dtype, None, config, made.attention)
            found = found.to(torch.device(made.device)).eval().requires_grad_(requires_grad=False)
            if not hasattr(config, "head_dim"):  # some presses ask for it, and a configuration of Qwen2 has none
                found.config.head_dim = _model_shape(self.location, made.dtype).head_size
            _loaded[key] = found
        return found

    @functools.cached_property
    def _tools(self) -> Tools:
        twin, patched = self._patched()
        files = [file for kind in self._named for file in files_of(kind)]
        press, where = self.press, self.where

        def make_cache(tokens: int) -> Any:
            return self.cache.make(f"{where}: cache", {"config": twin.config, "max_cache_len": tokens})

        make_press = None if press is None else functools.partial(press.make, f"{where}: press", {})
        text = "" if press is None else press.text
        return Tools(where, twin, self.settings.attention, make_cache, make_press, patched, files, text)

    @functools.cached_property
    def _trial(self) -> tuple[int, str]:
        """How many streams a call advances, and why these are fewer than the settings say."""
        decoding = self.press is not None and presses.decodes(self._tools.make_press())  # type: ignore[misc]
        rows = 1 if decoding else self.settings.rows
        found, note = independent_rows(self._tools, self.facts.vocabulary, self.facts.positions, rows)
        return found, "one stream a call, since the press acts while decoding" if decoding else note

    def _patched(self) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
        """Return the side's twin, and a function that returns the context in which the patch acts."""
        shared = {id(weight): weight for weight in (*self._network.parameters(), *self._network.buffers())}
        twin, patch = copy.deepcopy(self._network, shared), self.patch
        if patch is None:
            return twin, nullcontext
        before, named = _probed(self._network), f"{self.where}: patch = '{self.settings.patch}'"
        try:
            context = patch(twin)
            contexts = hasattr(context, "__enter__")
            with context if contexts else nullcontext():
                _probed(twin)
        except Exception as error:
            raise InputError(f"{named}: {failure_in(error, files_of(patch))}") from error
        if not torch.equal(_probed(self._network), before):
            raise InputError(
                f"{named}: moves the reference, too, since it changes a class or a module for good; return a context "
                "that undoes the change, or change the model's own objects"
            )
        return twin, functools.partial(patch, twin) if contexts else nullcontext


def _model_shape(location: str, dtype: str) -> ModelShape:
    """Return the sizes of the model at ``location``, which are read from its configuration."""
    return ModelShape.of(read_configuration(location, None).to_dict(), dtype)


def _probed(network: Any) -> torch.Tensor:
    """Return a network's logits after some tokens, without a cache, float32 [V]."""
    with torch.no_grad():
        ids = torch.tensor([_PROBE], device=network.device)
        logits: torch.Tensor = network(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()
    return logits


def press_library() -> Library:
    """Return the presses that expressions may name."""
    return Library("press", presses.LIBRARY, presses.base_press(), presses.press_classes())


def cache_library() -> Library:
    """Return the caches that expressions may name."""
    caches = library().cache_utils
    base: type[Any] = caches.Cache
    classes = {name: kind for name, kind in vars(caches).items() if isinstance(kind, type) and issubclass(kind, base)}
    return Library("cache", f"transformers {version('transformers')}", base, classes)


def _function(written: str, where: str, folder: Path | None) -> Callable[[Any], Any]:
    module_name, _, name = written.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise InputError(f"{where}: is no name of a module and a function in it; write module:function")
    module = load_module(module_name, folder, where)
    found = getattr(module, name, None)
    if not isinstance(found, FunctionType):
        there = [key for key, value in vars(module).items() if isinstance(value, FunctionType)]
        raise InputError(f"{where}: {module.__file__} has no function '{name}'; {nearest(name, there)}")
    return found


def _quantizer(cache: Call) -> str | None:
    """Return the package that a cache quantizes with; None if it needs none."""
    backend = cache.options.get("backend", cache.arguments[0] if cache.arguments else None)
    return _QUANTIZERS.get(backend) if cache.kind is library().QuantizedCache and isinstance(backend, str) else None


def _check_quantizer(cache: Call, where: str) -> None:
    package = _quantizer(cache)
    try:
        version(package or "torch")
    except PackageNotFoundError:
        raise InputError(f"{where}: needs {package}, which is not installed: {installing('quantizers')}") from None
