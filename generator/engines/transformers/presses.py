"""The presses of kvpress (https://github.com/NVIDIA/kvpress): which run here, when, and at which positions.

What is said of a press is read from its class, and tried when a study loads: no list of names stands here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from kvdrift.generator.selectors.kvpress import PREFIX, PRESSES, VERSION, load_kvpress

_FETCHING = frozenset({"from_pretrained", "hf_hub_download", "load_dataset", "requests"})
_OF_CONTEXT = "__call__"  # KVzip reads the tokenizer there, which is on the machine


def press_classes() -> dict[str, type[Any]]:
    """Return the classes of kvpress that are derived from its ``BasePress``, by name."""
    kvpress = load_kvpress()
    base = base_press()
    found = {
        name: value for name, value in vars(kvpress).items() if isinstance(value, type) and issubclass(value, base)
    }
    return dict(sorted(found.items()))


def base_press() -> type[Any]:
    """Return ``BasePress``, the class that all presses are derived from."""
    base: type[Any] = load_kvpress().BasePress
    return base


def refusal(kind: type[Any]) -> str | None:
    """Return why presses of a class cannot run here, in words; None if nothing speaks against them."""
    kvpress = load_kvpress()
    base, scorer = kvpress.BasePress, kvpress.ScorerPress
    idle = all(getattr(kind, name) is getattr(base, name) for name in ("compress", "forward_hook", "__call__"))
    if idle or (kind.compress is scorer.compress and kind.score is scorer.score):
        return "is a base class without scores"
    if (function := _fetching(kind)) is not None:
        return f"downloads, in {function}, what it has for a few models"
    if hasattr(kind, "update_model_and_tokenizer"):
        return "adds a token to the model and its tokenizer, which both sides would have to share"
    return None


def prefills(press: Any) -> bool:
    """Return whether a press compresses the prompt, as kvpress' pipeline decides it."""
    return not isinstance(press, load_kvpress().DecodingPress)


def decodes(press: Any) -> bool:
    """Return whether a press acts at every decoding step, too, as kvpress' pipeline decides it."""
    kvpress = load_kvpress()
    always = isinstance(press, kvpress.DecodingPress | kvpress.PrefillDecodingPress)
    return always or (isinstance(press, kvpress.DMSPress) and bool(press.decoding))


def renumbers(press: Any) -> bool:
    """Return whether decoding goes on at the position after the last kept entry, as kvpress' pipeline decides it."""
    return isinstance(press, load_kvpress().KeyRerotationPress)


@contextmanager
def masking(implementation: str) -> Iterator[None]:
    """Let attention leave out the entries that a press has masked, as the import of kvpress does for good."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - transformers takes seconds

    if implementation not in ALL_ATTENTION_FUNCTIONS:  # eager attention, which kvpress cannot mask
        yield
        return
    plain = ALL_ATTENTION_FUNCTIONS[implementation]
    ALL_ATTENTION_FUNCTIONS[implementation] = load_kvpress("kvpress.attention_patch").attention_patch(plain)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(implementation)
        if ALL_ATTENTION_FUNCTIONS.get(implementation) is not plain:
            ALL_ATTENTION_FUNCTIONS[implementation] = plain


def listed() -> list[tuple[str, str | None]]:
    """Return all presses by name, each with why it cannot run here; None if it can."""
    return [(name, refusal(kind)) for name, kind in press_classes().items()]


def fast(name: str) -> str:
    """Return the words that a press of this name is a selector, too; "" if it is not."""
    return f', and faster as selector = "{PREFIX}{name}"' if name in PRESSES else ""


def _fetching(kind: type[Any]) -> str | None:
    """Return the name of a function of a class that fetches files, or that calls a function which does; else None."""
    inside = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == kind.__module__.partition(".")[0]]
    for base in inside:
        for name, value in vars(base).items():
            function = _plain(value)
            if function is not None and name != _OF_CONTEXT and _fetches(function, set()):
                return name
    return None


def _fetches(function: Callable[..., Any], seen: set[CodeType]) -> bool:
    """Return whether a function, or one of its module that it calls, names something that fetches files."""
    code = function.__code__
    if code in seen:
        return False
    seen.add(code)
    names = {name for part in _parts(code) for name in part.co_names}
    called = [_plain(function.__globals__[name]) for name in names if name in function.__globals__]
    beside = [one for one in called if one is not None and one.__module__ == function.__module__]
    return bool(names & _FETCHING) or any(_fetches(one, seen) for one in beside)


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _plain(value: Any) -> Any:
    """Return the function that a method, static method, property or decorated function has inside; else None."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    value = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    return value if inspect.isfunction(value) else None


LIBRARY = f"kvpress {VERSION}"
