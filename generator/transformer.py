"""Transformers as ``StreamKernels``: one prefill, one compact cache per action, streams that share their prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from generator.attention import PrefixLayer, PromptLayer, PromptRecording, SharedPrefix
from generator.eviction import CompactCache
from generator.models import LoadedModel


class Prompt:
    """One prefilled prompt: what selectors see of every layer, and the law of position 1."""

    def __init__(self, model: LoadedModel, tokens: Sequence[int], window: int) -> None:
        recording = PromptRecording(max(window, 1))
        ids = torch.tensor([list(tokens)], device=model.device)
        with torch.inference_mode():
            output = model.network(input_ids=ids, use_cache=False, logits_to_keep=1, kvdrift_attention=recording)
        self.entries = len(tokens)
        self.layers: list[PromptLayer] = recording.layers
        self.first_law = _law(output.logits[0, -1])


class TransformerKernels:
    """``StreamKernels`` of one document: cache 0 is the whole prompt, cache a the a-th compact one."""

    def __init__(self, model: LoadedModel, prompt: Prompt, caches: Sequence[CompactCache], horizon: int) -> None:
        self._model = model
        self._prompt = prompt
        self._position = prompt.entries
        whole = tuple(PrefixLayer(layer.key, layer.value) for layer in prompt.layers)
        self._attention = SharedPrefix([whole, *(cache.layers for cache in caches)], horizon)
        self._stream_cache = torch.empty(0, dtype=torch.int64)
        self._physical = torch.empty(0, dtype=torch.int64)  # each physical row's stream
        self._first_row = torch.empty(0, dtype=torch.int64)  # each stream's physical row

    @property
    def vocabulary_size(self) -> int:
        """V, from the law of position 1."""
        return len(self._prompt.first_law)

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """EOS tokens of the model's generation configuration."""
        return self._model.eos_tokens

    @property
    def device(self) -> str:
        """The model's device."""
        return self._model.device

    def first_law(self) -> Tensor:
        """The law [V] of position 1, float64."""
        return self._prompt.first_law

    def open(self, caches: Sequence[int]) -> None:
        """Start one stream per entry; ``caches`` ascends."""
        self._position = self._prompt.entries
        self._stream_cache = torch.tensor(caches, device=self.device)
        self._place(self._attention.open(caches).to(self.device))

    def select(self, rows: Tensor) -> None:
        """See ``StreamKernels.select``; where nothing changes nothing is copied."""
        if len(rows) == len(self._stream_cache) and bool((rows == torch.arange(len(rows), device=rows.device)).all()):
            return
        self._stream_cache = self._stream_cache[rows]
        self._place(self._attention.select(self._first_row[rows], self._stream_cache))

    def advance(self, tokens: Tensor) -> Tensor:
        """See ``StreamKernels.advance``; positions go on from the prompt's true length."""
        self._attention.next_position()
        position = torch.full((1, 1), self._position, device=self.device)
        with torch.inference_mode():
            output = self._model.network(
                input_ids=tokens[self._physical][:, None],
                position_ids=position,
                use_cache=False,
                kvdrift_attention=self._attention,
            )
        self._position += 1
        return _law(output.logits[self._first_row, 0])

    @property
    def stream_bytes(self) -> int:
        """Bytes of one stream's own suffix buffers: keys and values of H generated entries in every layer."""
        return self._attention.stream_bytes

    def _place(self, physical: Tensor) -> None:
        self._physical = physical
        first = torch.full((len(self._stream_cache),), len(physical), device=physical.device)
        rows = torch.arange(len(physical), device=physical.device)
        self._first_row = first.scatter_reduce(0, physical, rows, reduce="amin")


def _law(logits: Tensor) -> Tensor:
    """Softmax over the whole vocabulary at temperature 1, in float64."""
    return logits.double().softmax(-1)
