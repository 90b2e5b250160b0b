"""Read a model's configuration through transformers, and check whether the model is supported."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from kvdrift.generator.transformer.files.local_folders import (
    ARCHITECTURES,
    local_configuration,
    model_source,
)
from kvdrift.schema.errors import InputError, reading
from kvdrift.schema.log_levels import raised_level

_MOST_LAYERS = 10_000  # each takes memory in the configuration before any weight is read
_STATES = {"linear_attention", "conv", "hybrid"}  # layers with states; a hybrid layer has attention, too
_LONG_ROPE = "longrope"
_KERNELS = "transformers.integrations.hub_kernels"  # the logger of the module that chooses kernels


@functools.cache
def library() -> Any:
    """Return transformers, imported at the first call, since the import takes seconds."""
    import transformers  # noqa: PLC0415

    if sys.flags.optimize >= 2:
        # transformers extends docstrings when it defines a class, and fails where ``python -OO`` has dropped them.
        vars(transformers.utils)["auto_docstring"] = lambda defined=None, **_: defined or (lambda decorated: decorated)
    logging.getLogger(_KERNELS).addFilter(_is_no_advice)
    return transformers


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Return False for a record with advice to install other kernels, which recurrent models log; else True."""
    return "falling back to its reference PyTorch implementation" not in record.getMessage()


def read_configuration(model_id: str, revision: str | None) -> Any:
    """Return the model's configuration, downloaded if necessary; of a multimodal model, the language model's."""
    source = model_source(model_id)
    layers = (local_configuration(model_id, revision) or {}).get("num_hidden_layers")
    if type(layers) is int and layers > _MOST_LAYERS:
        raise InputError(f"model.id = '{model_id}': num_hidden_layers = {layers}: at most {_MOST_LAYERS:,} are read")
    with reading(f"model.id = '{model_id}': cannot load its configuration", Exception), quiet():
        whole = library().AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    text: Any = getattr(whole, "text_config", None)
    causal = None if text is None else causal_class(text)
    if text is None or causal is None:
        return whole
    text.architectures = [causal]
    text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def causal_class(config: Any) -> str | None:
    """Return the class name of transformers' causal language model for a configuration's type; None if it has none."""
    name = library().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return name if name is not None and name.endswith("ForCausalLM") else None


def position_limit(model_id: str, *, revision: str | None = None) -> int:
    """Return the most tokens, prompt and generated ones together, that the model's configuration allows."""
    return _number(model_id, revision, "max_position_embeddings")


def vocabulary_size(model_id: str, *, revision: str | None = None) -> int:
    """Return the number of a model's tokens, by its configuration."""
    return _number(model_id, revision, "vocab_size")


def head_size(model_id: str, *, revision: str | None = None) -> int:
    """Return the number of channels of a head, by the model's configuration."""
    stated = local_configuration(model_id, revision) or {}
    if not {"hidden_size", "num_attention_heads"} <= set(stated):
        stated = read_configuration(model_id, revision).to_dict()
    with reading(f"model.id = '{model_id}': its configuration gives no size of a head (head_dim)", TypeError):
        return int(stated.get("head_dim") or stated["hidden_size"] // stated["num_attention_heads"])


def _number(model_id: str, revision: str | None, name: str) -> int:
    stated = (local_configuration(model_id, revision) or {}).get(name)
    if type(stated) is int:
        return stated
    configuration = read_configuration(model_id, revision)
    with reading(f"model.id = '{model_id}': its configuration has no number {name}", TypeError, AttributeError):
        return int(getattr(configuration, name))


def check_supported(config: Any, model_id: str) -> None:
    """Raise an error if the configuration shows an architecture, attention or RoPE that is not supported."""
    with reading(f"model.id = '{model_id}': cannot load its configuration", TypeError, AttributeError):
        problem = _unsupported(config)
    if problem is not None:
        raise InputError(f"model.id = '{model_id}': {problem}")


def _unsupported(config: Any) -> str | None:
    names, kind = list(config.architectures or []), config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return f"encoder-decoder architecture {', '.join(names) or 'unknown'} is not supported"
    if causal_class(config) not in names or not names:
        named = f"architecture {', '.join(names) or 'unknown'} as '{kind}'"
        return f"{named} is not supported: it is not the causal language model that transformers has of this type"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) is not supported: its cache holds no keys and values of heads"
    if shared := getattr(config, "num_kv_shared_layers", None):
        return f"{shared} layers that read the entries of other layers (num_kv_shared_layers) are not supported"
    return _unsupported_layers(config)


def _unsupported_layers(config: Any) -> str | None:
    types = set(_layer_types(config))
    if other := types - {"full_attention", "sliding_attention"} - _STATES:
        return f"attention of type '{min(other)}' is not supported"
    if types and not types & {"full_attention", "hybrid"}:
        problem = (
            "sliding-window attention in all layers"
            if types == {"sliding_attention"}
            else "a model without full attention"
        )
        return f"{problem} is not supported: no entry could be evicted"
    ropes = (getattr(config, "rope_parameters", None) or {}).values()
    if any(isinstance(part, dict) and part.get("rope_type") == _LONG_ROPE for part in ropes):
        return f"RoPE of type '{_LONG_ROPE}' for some layers is not supported: all layers must share rope_parameters"
    return None


def rope_switch(config: Any) -> int | None:
    """Return the number of positions beyond which RoPE has other frequencies (LongRoPE); None for other types.

    The frequencies of type "dynamic" change only beyond ``max_position_embeddings``, which no prompt exceeds.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == _LONG_ROPE else None


def position_switch(model_id: str, *, revision: str | None = None) -> int | None:
    """Return ``rope_switch`` of a model; transformers is used only if ``config.json`` names LongRoPE."""
    stated = local_configuration(model_id, revision) or {}
    ropes = [stated.get(name) for name in ("rope_parameters", "rope_scaling")]
    named = {str(rope.get("rope_type") or rope.get("type")) for rope in ropes if isinstance(rope, dict)}
    return rope_switch(read_configuration(model_id, revision)) if named & {_LONG_ROPE, "su"} else None


def has_states(config: Any) -> bool:
    """Return whether some layers have a convolution's or a recurrent state."""
    return not _STATES.isdisjoint(_layer_types(config))


def known_by_family(config: Any) -> bool:
    """Return whether a model needs no proof (``proof``): all tests run on its family, and all attention is full.

    Quantized weights need a proof in every family, since the library that quantized them computes their products.
    """
    known = config.model_type in ARCHITECTURES.values() and getattr(config, "quantization_config", None) is None
    return known and set(_layer_types(config)) <= {"full_attention"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from showing progress bars, advice and warnings inside the block."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    library().utils.logging.disable_progress_bar()
    with raised_level("transformers", logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _layer_types(config: Any) -> list[str]:
    """Return the layers' types; if none are listed, ["sliding_attention"] for a model with a window, else []."""
    whole = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return list(getattr(config, "layer_types", None) or whole)
