"""The presses of kvpress (https://github.com/NVIDIA/kvpress): which run here, when, and at which positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvdrift.generator.selectors.kvpress import PREFIX, PRESSES, VERSION, load_kvpress

_DOWNLOADING = (
    "DuoAttentionPress", "ExpectedAttentionStatsPress", "FastKVzipPress", "KVzapPress", "LUKVPress", "QFilterPress",
    "RestoreKVPress",
)  # fmt: skip


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
    if kind in (base_press(), load_kvpress().ScorerPress):
        return "is a base class without scores"
    if any(base.__name__ in _DOWNLOADING for base in kind.__mro__):
        return "downloads what it has for a few models"
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


LIBRARY = f"kvpress {VERSION}"
