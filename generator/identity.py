"""The identity of a unit: fingerprints of model and selector, the version of numerics, and the GPU.

Units with different identities are never pooled or contrasted. Units of
different GPU models are pooled only if the study allows it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Self

from kvdrift.schema.errors import InputError
from kvdrift.schema.python_source import imported_modules, syntax_sha256
from kvdrift.schema.study import ModelSection

if TYPE_CHECKING:
    from kvdrift.generator.codecs.codec import Codec  # which imports torch
    from kvdrift.generator.codecs.generated import GeneratedEntries
    from kvdrift.generator.selectors.layer_choice import ChosenLayers
    from kvdrift.generator.selectors.policies.policy import Policy
    from kvdrift.generator.selectors.selector import Selector

NUMERICS_VERSION: Final = 5
"""Version of the generator's own arithmetic; CONTRIBUTING.md says when to raise it."""

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class ActionIdentity:
    """The identity of an action's units, as columns of ``identities`` and ``units``; None is unknown.

    Attributes:
        weights_sha256: SHA-256 of the model's configuration and weights, of a finite-state reference's distributions,
            or of the reference server's report of itself.
        tokenizer_sha256: SHA-256 of the tokenizer's files; None without a tokenizer.
        selector_sha256: SHA-256 of the source and parameters of the selector and of the codec or policy (if any), and
            of the action's own weights; or of a finite-state action's distributions.
        numerics: The version of the generator's own arithmetic.
        eos_tokens: The ids of the tokens that end a text, separated by commas; an ended side continues to emit the
            first. "" if no token ends a text; None for finite-state systems, whose tables determine it.
    """

    weights_sha256: str | None
    tokenizer_sha256: str | None
    selector_sha256: str | None
    numerics: int | None = NUMERICS_VERSION
    eos_tokens: str | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """Return the identity's values by column."""
        return asdict(self)


def changes(stored: ActionIdentity, present: ActionIdentity) -> list[str]:
    """Return the columns in which two identities differ.

    ``weights_sha256``, ``selector_sha256`` and ``eos_tokens`` do not count if they are unknown in ``present``.
    """
    of_weights = ("weights_sha256", "selector_sha256", "eos_tokens")
    return [
        name
        for name, value in present.columns.items()
        if value != stored.columns[name] and (name not in of_weights or value is not None)
    ]


IDENTITY_COLUMNS: Final = tuple(field.name for field in fields(ActionIdentity))


def written_tokens(tokens: Iterable[int]) -> str:
    """Return token ids as text, separated by commas: the value of column ``eos_tokens``."""
    return ",".join(map(str, tokens))


@dataclass(frozen=True)
class ModelIdentity:
    """A model's part of the identity of its units.

    ``eos_tokens`` are the tokens that end a text. They and ``weights_sha256`` are None if they are not known, for
    example because the model is on another machine.
    """

    weights_sha256: str | None
    tokenizer_sha256: str | None
    eos_tokens: tuple[int, ...] | None = None

    def of(
        self, parts: tuple[Selector, *tuple[Codec | Policy | GeneratedEntries | ChosenLayers, ...]]
    ) -> ActionIdentity:
        """Return the identity of the units that the model makes with the parts of an action, its selector first."""
        ends = None if self.eos_tokens is None else written_tokens(self.eos_tokens)
        return ActionIdentity(self.weights_sha256, self.tokenizer_sha256, parts_sha256(parts), eos_tokens=ends)


@dataclass(frozen=True)
class GpuKinds:
    """The GPU models on which units were made, or are to be made; GPUs of different models round differently.

    ``names`` are CUDA's; empty if no unit was made on a GPU, or if the GPU is not known. ``phrase`` is the part of a
    message that says who computes on these GPUs.
    """

    names: frozenset[str]
    phrase: str

    @classmethod
    def of_units(cls, versions: Iterable[str | None]) -> Self:
        """Return the GPU models that made the units, read from their column ``versions``."""
        gpus = (json.loads(text).get("gpu") for text in set(versions) if text is not None)
        names = frozenset(name for name in gpus if name is not None)
        return cls(names, f"the store's units were made on {' and '.join(sorted(names))}")

    @classmethod
    def together(cls, kinds: Iterable[Self]) -> Self:
        """Return the GPU models that made the units of several studies."""
        names = frozenset(name for kind in kinds for name in kind.names)
        return cls(names, f"the store's units were made on {' and '.join(sorted(names))}")

    @classmethod
    def at(cls, who: str, gpu: str | None) -> Self:
        """Return the GPU model ``gpu`` of ``who``, such as a worker or endpoint; empty if ``gpu`` is None (a CPU)."""
        return cls(frozenset([] if gpu is None else [gpu]), f"{who} on {gpu}")

    def difference(self, who: str, gpu: str | None) -> str | None:
        """Return a message that ``who`` has another GPU model, ``gpu``; None if the models agree or ``gpu`` is None."""
        if gpu is None or self.names <= {gpu}:
            return None
        return f"{who}: computes on {gpu}, {self.phrase}; events of unlike GPUs can differ"

    def check(self, who: str, gpu: str | None, model: ModelSection) -> None:
        """Check that ``who``, which is to make more units, has no other GPU model, unless ``model`` allows several."""
        if not model.mixed_gpus and (line := self.difference(who, gpu)) is not None:
            raise InputError(f"{line}: use one GPU model, or write mixed_gpus = true under [model] of the study file")


def parts_sha256(parts: tuple[Selector, *tuple[Codec | Policy | GeneratedEntries | ChosenLayers, ...]]) -> str:
    """Return the SHA-256, in hexadecimal, of the source and parameters of an action's parts.

    If the selector is the only part, the result is that of ``selector_sha256``.
    """
    selector, *others = parts
    of_selector = selector_sha256(selector)
    if not others:
        return of_selector
    kinds: list[Any] = [type(part) for part in others]
    described = [
        [kind.__qualname__, source_of(kind), part.parameters] for kind, part in zip(kinds, others, strict=True)
    ]
    return _sha256([of_selector, *described])


def selector_sha256(selector: Selector) -> str:
    """Return the SHA-256, in hexadecimal, of a selector's source and parameters."""
    from kvdrift.generator.selectors.selector import parameters_of  # noqa: PLC0415 - it imports torch, as every part does

    kind = type(selector)
    described = [selector.identity(), parameters_of(selector), selector.window, selector.sinks]
    return _sha256([kind.__qualname__, source_of(kind), *described])


def _sha256(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def source_of(kind: type[Any] | FunctionType) -> tuple[tuple[str, str], ...]:
    """Return the source of a class or function that an action has: names of files, hashes of syntax trees, sorted.

    The source is that of the modules which define the class and its bases below ``Selector``, ``Codec`` or ``Policy``,
    and of the modules beside them that they import, directly or not. A module of kvdrift is beside the others of its
    package; a user's module is beside those of its folder or, in a package, of the whole package. For an installed
    distribution, name and version stand for the source. ``NUMERICS_VERSION`` covers code of ``generator`` outside a
    part's package.

    Comments, formatting and docstrings do not count (``syntax_sha256``).

    Source is read when a class is first used, since a loaded class does not change with its file. Of a module of a
    study's folder, the text from which it was loaded counts.
    """
    installed, texts = _source_files(kind)
    return tuple(sorted(installed | {(path.name, syntax_sha256(text)) for path, text in texts.items()}))


def custom_texts(kind: type[Any]) -> dict[Path, bytes]:
    """Return the texts of the files that define a class, without files of kvdrift and of installed distributions."""
    ours = Path(__file__).resolve().parent
    return {path: text for path, text in _source_files(kind)[1].items() if ours not in path.parents}


def _source_files(kind: type[Any] | FunctionType) -> tuple[set[tuple[str, str]], dict[Path, bytes]]:
    """Return the source of a class: names and versions of installed distributions, and the texts of all other files."""
    from kvdrift.generator.selectors.custom.loading import loaders_of  # noqa: PLC0415 - it imports torch, as every part does

    installed, texts = set[tuple[str, str]](), dict[Path, bytes]()
    for base in getattr(kind, "__mro__", (kind,)):  # a function stands for itself
        ours = base.__module__.startswith(f"{_PACKAGE}.")
        if base.__module__.partition(".")[0] in sys.stdlib_module_names or (
            ours and getattr(base, "__bases__", None) == (ABC,)
        ):
            continue
        # For a class from a study's folder: the modules that were loaded with it, with the texts as loaded.
        loaded = {name: (Path(loader.path), loader.text) for name, loader in loaders_of(base).items()}
        file = loaded[base.__module__][0] if loaded else _file_of(base)
        if not ours and (distribution := _distribution_of(file)) is not None:
            installed.add(distribution)
            continue
        waiting = {base.__module__: file}
        while waiting:
            name, path = waiting.popitem()
            if path in texts:
                continue
            try:
                texts[path] = loaded[name][1] if loaded else path.read_bytes()
                imported = [*imported_modules(texts[path], name, package=path.stem == "__init__")]
            except (OSError, SyntaxError, ValueError) as error:
                line = f"{path}: cannot be read as Python source, which an action's identity needs ({error})"
                raise InputError(line) from None
            for other in imported:
                beside = loaded.get(other, (None,))[0] if loaded else _file_beside(base, file, other)
                if beside is not None:
                    waiting[other] = beside
    return installed, texts


def _file_of(kind: type[Any] | FunctionType) -> Path:
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if path is None:
        raise InputError(
            f"class '{kind.__qualname__}': module '{kind.__module__}' has no source file; define the class in one"
        )
    return Path(path).resolve()


def _distribution_of(file: Path) -> tuple[str, str] | None:
    """Return the distribution that installed a module's file, as name and version; None for other files."""
    places = [place for place, part in enumerate(file.parts) if part in _INSTALLED]
    if not places:
        return None
    module = Path(file.parts[places[-1] + 1]).stem
    if module not in distributions_by_module():
        distributions_by_module.cache_clear()  # it may have been installed since
    names = distributions_by_module().get(module)
    return (names[0], version(names[0])) if names else None


@functools.cache
def distributions_by_module() -> Mapping[str, list[str]]:
    """Return the distributions of each module; to find them takes a third of a second, since all files are listed."""
    return packages_distributions()


def _file_beside(kind: type[Any] | FunctionType, file: Path, name: str) -> Path | None:
    """Return the file of module ``name`` if it is beside the class ``kind``, which ``file`` defines; else None."""
    package, _, last = kind.__module__.rpartition(".")
    if file.stem == "__init__":
        package, file = kind.__module__, file.parent / last
    if package.partition(".")[0] != _PACKAGE:  # a user's package counts as a whole
        home = package.partition(".")[0]
        file, package = [file, *file.parents][package.count(".")], home
    if package and not f"{name}.".startswith(f"{package}."):
        return None
    place = file.parent.joinpath(*name.removeprefix(package).removeprefix(".").split("."))
    return next((path for path in (place / "__init__.py", place.with_name(f"{place.name}.py")) if path.is_file()), None)
