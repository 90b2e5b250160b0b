"""Networks of transformers: loaded once for all sides that compute with the same weights, and twins over these weights.

A twin has modules of its own and the weights of its network. Hooks, masks and patches of a side are put on its twin, so
the reference and other sides keep theirs.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.transformer.files.configuration import causal_class, library, read_configuration
from kvdrift.generator.transformer.loading import load_network
from kvdrift.generator.transformer.memory import ModelShape
from kvdrift.generator.transformer.model_checks import checked_configuration

_loaded: weakref.WeakValueDictionary[tuple[str, ...], Any] = weakref.WeakValueDictionary()


def network(location: str, dtype: str, attention: str, device: str) -> Any:
    """Return the network at ``location``, loaded unless another side has it already."""
    key = (location, dtype, attention, device)
    found = _loaded.get(key)
    if found is None:
        config = checked_configuration(location, dtype, None, device, None)
        found = load_network(location, None, dtype, None, config, attention)
        found = found.to(torch.device(device)).eval().requires_grad_(requires_grad=False)
        if not hasattr(config, "head_dim"):  # some presses ask for it, and a configuration of Qwen2 has none
            found.config.head_dim = model_shape(location, dtype).head_size
        _loaded[key] = found
    return found


def twin(network: Any) -> Any:
    """Return modules of their own over the weights of a network."""
    shared = {id(weight): weight for weight in (*network.parameters(), *network.buffers())}
    return copy.deepcopy(network, shared)


def model_shape(location: str, dtype: str) -> ModelShape:
    """Return the sizes of the model at ``location``, which are read from its configuration."""
    return ModelShape.of(read_configuration(location, None).to_dict(), dtype)


def model_class(location: str) -> type[Any]:
    """Return the class in transformers of the model at ``location``."""
    found: type[Any] = getattr(library(), causal_class(read_configuration(location, None)) or "")
    return found


def probe_logits(network: Any, tokens: list[int]) -> Tensor:
    """Return a network's logits after some tokens, without a cache, float32 [V]."""
    with torch.no_grad():
        ids = torch.tensor([tokens], device=network.device)
        logits: Tensor = network(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()
    return logits
