"""The identity of a unit: fingerprints of model and selector, the version of numerics, and the GPU.

Units with different identities are never pooled or contrasted (definitions, "Identity and revisions"). Units of
different GPU models are pooled only if the study allows it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from kvdrift.generator.import_statements import import_statements
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import ModelSection

if TYPE_CHECKING:
    from kvdrift.generator.codecs.codec import Codec  # which imports torch
    from kvdrift.generator.codecs.generated import GeneratedEntries
    from kvdrift.generator.selectors.policies.policy import Policy
    from kvdrift.generator.selectors.selector import Selector

NUMERICS_VERSION: Final = 3
"""Version of the generator's own arithmetic; CONTRIBUTING.md says when to raise it."""

_OWN = __name__.partition(".")[0]
_OURS = Path(__file__).resolve().parents[1]  # in which packages such as kvdrift.generator are folders
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class ActionIdentity:
    """The identity of an action's units, as columns of ``identities`` and ``units``; None is unknown.

    Attributes:
        weights_sha256: SHA-256 of the model's configuration and weights, of a finite-state reference's laws, or of the
            reference server's report of itself.
        tokenizer_sha256: SHA-256 of the tokenizer's files; None without a tokenizer.
        selector_sha256: SHA-256 of the source and parameters of the selector, of the codec if there is one, and of the
            action's own weights; or of a finite-state action's laws.
        numerics: The version of the generator's own arithmetic.
        eos_tokens: The ids of the tokens that end a text, separated by commas, the token that fills first; "" if none
            does. None for finite-state systems, whose laws say it.
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
    """Return the columns in which two identities differ; what is presently unknown of the weights is ignored."""
    of_weights = ("weights_sha256", "selector_sha256", "eos_tokens")
    return [
        name
        for name, value in present.columns.items()
        if value != stored.columns[name] and (name not in of_weights or value is not None)
    ]


IDENTITY_COLUMNS: Final = tuple(field.name for field in fields(ActionIdentity))


def written_tokens(tokens: Iterable[int]) -> str:
    """Return token ids as the column ``eos_tokens`` has them."""
    return ",".join(map(str, tokens))


@dataclass(frozen=True)
class ModelIdentity:
    """A model's part of the identity of its units.

    ``weights_sha256`` and ``eos_tokens``, the tokens that end a text, are None if the model is not known here.
    """

    weights_sha256: str | None
    tokenizer_sha256: str | None
    eos_tokens: tuple[int, ...] | None = None

    def of(self, parts: tuple[Selector, *tuple[Codec | Policy | GeneratedEntries, ...]]) -> ActionIdentity:
        """Return the identity of the units that the model makes with the parts of an action, its selector first."""
        ends = None if self.eos_tokens is None else written_tokens(self.eos_tokens)
        return ActionIdentity(self.weights_sha256, self.tokenizer_sha256, parts_sha256(parts), eos_tokens=ends)


@dataclass(frozen=True)
class GpuKinds:
    """The GPU models that made the units of a study and model; different models round differently.

    Names are those by CUDA; empty if no unit was made on a GPU, or if it is not known. ``told`` are words about them.
    """

    names: frozenset[str]
    told: str

    @classmethod
    def of_units(cls, versions: Iterable[str | None]) -> Self:
        """Return the GPU models that made the units, read from their column ``versions``."""
        found = (json.loads(text).get("gpu") for text in set(versions) if text is not None)
        names = frozenset(name for name in found if name is not None)
        return cls(names, f"the store's units were made on {' and '.join(sorted(names))}")

    @classmethod
    def together(cls, kinds: Iterable[Self]) -> Self:
        """Return the GPU models that made the units of several studies."""
        names = frozenset(name for one in kinds for name in one.names)
        return cls(names, f"the store's units were made on {' and '.join(sorted(names))}")

    @classmethod
    def at(cls, who: str, gpu: str | None) -> Self:
        """Return the GPU model of an endpoint, a worker or this machine; empty on a CPU."""
        return cls(frozenset([] if gpu is None else [gpu]), f"{who} on {gpu}")

    def difference(self, who: str, gpu: str | None) -> str | None:
        """Return a line that says that ``who`` has another GPU model; None if the models agree."""
        if gpu is None or self.names <= {gpu}:
            return None
        return f"{who}: computes on {gpu}, {self.told}; events of unlike GPUs can differ"

    def check(self, who: str, gpu: str | None, model: ModelSection) -> None:
        """Check that a machine that is to make more units has the same GPU model, unless the study allows several."""
        if not model.mixed_gpus and (line := self.difference(who, gpu)) is not None:
            raise InputError(f"{line}: use one kind, or write mixed_gpus = true under [model] of the study file")


def parts_sha256(parts: tuple[Selector, *tuple[Codec | Policy | GeneratedEntries, ...]]) -> str:
    """Return the SHA-256, in hexadecimal, of an action's parts; for a selector alone, that of the selector."""
    selector, *others = parts
    own = selector_sha256(selector)
    if not others:
        return own
    said = [own, *([type(part).__qualname__, _source_of_part(part), part.parameters] for part in others)]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _source_of_part(part: Codec | Policy | GeneratedEntries) -> tuple[tuple[str, str], ...]:
    return source_of(type(part))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are


def selector_sha256(selector: Selector) -> str:
    """Return the SHA-256, in hexadecimal, of a selector's source and parameters.

    The source is that of the modules which define the selector's class and its bases below ``Selector``, and of the
    modules beside these that they import, in turn. A module is beside another if it is in the same folder or package.
    For an installed distribution, name and version stand for the source. Code of ``generator`` outside
    ``kvdrift.generator.selectors`` that selectors use belongs to the numerics.

    Source is read when a class is first asked for, since a loaded class does not change with its file.
    """
    own = {field.name: getattr(selector, field.name) for field in fields(selector)}  # type: ignore[arg-type]  # a dataclass
    kind = type(selector)
    said = [kind.__qualname__, source_of(kind), selector.identity(), own, selector.window, selector.sinks]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def source_of(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return the files that define the class of an action's part: names with SHA-256, sorted."""
    return tuple(sorted({(name, says) for name, says, _ in _files_of(kind).values()}))


def own_texts(kind: type[Any]) -> dict[str, str]:
    """Return the texts of files that are neither the package's nor an installed distribution's, by path or name."""
    ours = Path(__file__).parent
    return {
        str(file): text.decode("utf-8", "replace")
        for file, (_, _, text) in _files_of(kind).items()
        if text is not None and ours not in file.parents
    }


def _files_of(kind: type[Any]) -> dict[Path, tuple[str, str, bytes | None]]:
    """Return the files that define a class: for each a name, its SHA-256 or version, and its text."""
    from kvdrift.generator.codecs.codec import Codec  # noqa: PLC0415
    from kvdrift.generator.selectors.own.folders import is_held  # noqa: PLC0415 - whoever has a selector has torch
    from kvdrift.generator.selectors.own.names import source_texts  # noqa: PLC0415
    from kvdrift.generator.selectors.policies.policy import Policy  # noqa: PLC0415
    from kvdrift.generator.selectors.selector import Selector  # noqa: PLC0415

    roots = (Selector, Codec, Policy)  # what is derived from none of them is defined by its own module
    texts = source_texts(kind)
    waiting: list[_Source] = []
    found: dict[Path, tuple[str, str, bytes | None]] = {}
    for base in [base for base in kind.__mro__ if issubclass(base, roots) and base not in roots] or [kind]:
        module = sys.modules.get(base.__module__)
        imported = getattr(module, base.__name__, None) is base and not is_held(module)
        if base.__module__ in texts and not imported:  # loaded from a study's folder: what was loaded counts
            found |= {Path(f"{name}.py"): (f"{name}.py", _sha256(text), text) for name, text in texts.items()}
        else:
            waiting.append(_Source.of(base))
    while waiting:
        source = waiting.pop()
        if source.file in found:
            continue
        if (installed := source.distribution) is not None:
            found[source.file] = (*installed, None)
            continue
        text = source.text()
        found[source.file] = (source.file.name, _sha256(text.encode()), text.encode())
        waiting += source.imported(text)
    return found


@dataclass(frozen=True)
class _Source:
    """A module's file, the folder from which absolute imports start, and the folder whose files count as beside it."""

    file: Path
    root: Path
    home: Path

    @classmethod
    def of(cls, kind: type) -> _Source:
        """Find the file in which a class is defined."""
        name = kind.__module__
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None:
            raise InputError(f"class '{kind.__qualname__}': module '{name}' has no source file; put it in one")
        file = Path(path).resolve()
        parts = name.split(".")
        if parts[0] == _OWN:
            return cls(file, file.parent, file.parent)
        place = (file.parent if file.stem == "__init__" else file.with_suffix("")).parts
        if list(place[-len(parts) :]) != parts or len(parts) == 1:  # not a package's, or under another name
            return cls(file, file.parent, file.parent)
        root = Path(*place[: -len(parts)])
        return cls(file, root, root / parts[0])

    @property
    def distribution(self) -> tuple[str, str] | None:
        """The distribution that installed the module, as name and version; None for other modules."""
        folders = [place for place, part in enumerate(self.file.parts) if part in _INSTALLED]
        if not folders:
            return None
        top = Path(self.file.parts[folders[-1] + 1]).stem
        names = packages_distributions().get(top, [])
        return None if top == _OWN or not names else (names[0], version(names[0]))

    def text(self) -> str:
        try:
            if self.file.suffix != ".py":
                return hashlib.sha256(self.file.read_bytes()).hexdigest()
            with tokenize.open(self.file) as opened:
                return opened.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise InputError(f"{self.file}: the source of a class cannot be read ({error})") from None

    def imported(self, text: str) -> list[_Source]:
        """Return the modules beside the module that its text imports anywhere."""
        try:
            statements = import_statements(text)
        except SyntaxError:  # of an extension, or of a file that was edited since
            return []
        files = {path for statement in statements for path in self._named(statement)}
        return [_Source(file, self.root, self.home) for file in sorted(files) if self.home in file.parents]

    def _named(self, statement: ast.Import | ast.ImportFrom) -> Iterator[Path]:
        """Yield the files of the modules that one statement imports, if they are found from ``root``."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield from _module_file(self._place(alias.name))
            return
        if statement.level == 0 and statement.module:
            module = self._place(statement.module)
        else:
            start = self.file.parents[statement.level - 1]
            module = start.joinpath(*statement.module.split(".")) if statement.module else start
        for alias in statement.names:  # a module of the package, or else a name that the module has
            yield from _module_file(module / alias.name) or _module_file(module)

    def _place(self, name: str) -> Path:
        """Return where a module of an absolute name would be; the folders of kvdrift lie where this module's does."""
        first, *others = name.split(".")
        return _OURS.joinpath(*others) if first == _OWN else self.root.joinpath(first, *others)


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text.replace(b"\r\n", b"\n")).hexdigest()


def _module_file(place: Path) -> list[Path]:
    files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return [file.resolve() for file in files if file.is_file()][:1]
