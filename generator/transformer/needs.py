"""Check that a model's layers have what selectors need.

A selector's window and statistics show what it needs. A selector that looks at queries computes attention by itself.
"""

from __future__ import annotations

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.layer_traits import LayerTraits
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors.expected_attention import QueryMoments
from kvdrift.generator.selectors.kvpress import AttentionInputs
from kvdrift.schema.errors import InputError

_OF_KVPRESS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma3_text")  # types whose modules kvpress knows


def check_layers(action: Action, traits: LayerTraits) -> None:
    """Raise an error if an action's selector, or its policy's first cut, needs something that layers lack."""
    problem = _missing(action.chooser, traits)
    if problem is not None:
        name = action.selector_name if action.policy is None else type(action.chooser).__name__
        raise InputError(f"action '{action.name}': selector {name}: {problem}; take another selector")


def _missing(selector: Selector, traits: LayerTraits) -> str | None:
    statistics = selector.statistics
    if any(isinstance(one, AttentionInputs) for one in statistics) and traits.kind not in (None, *_OF_KVPRESS):
        return f"kvpress takes models of type {', '.join(_OF_KVPRESS)}, and this model is '{traits.kind}'"
    if (selector.window or statistics) and traits.softcap is not None and not selector.applies_softcap:
        return f"computes attention itself, without the soft cap of {traits.softcap:g} that this model has"
    if any(isinstance(one, QueryMoments) for one in statistics) and traits.turned_by_halves is False:
        return "needs layers that rotate whole heads by halves, and those of this model do not"
    return None
