"""One prompt under a transformer, prefilled: entries and states of its layers, and the distribution of position 1."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdrift.generator.attention.interface import counted
from kvdrift.generator.attention.recording import PromptLayer, PromptRecording, Statistic
from kvdrift.generator.attention.states import LayerStates
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.files.configuration import has_states, rope_switch
from kvdrift.generator.transformer.fused.head import Head
from kvdrift.generator.transformer.memory import PREFILL_CHUNK
from kvdrift.schema.sampling import Sampling


class Prompt:
    """A prefilled prompt of n entries: the selectors' data of all layers with attention, and the first distribution.

    ``window`` is the number of last queries to keep; ``statistics`` are gathered over all queries; ``at_once`` is the
    number of tokens of a chunk, PREFILL_CHUNK by default; ``first`` is the position of the first token. ``states`` are
    those of layers without attention after the last token; None if there are no such layers. The first distribution is
    the next-token distribution of position 1.
    """

    def __init__(
        self, model: Decoder, tokens: Sequence[int], window: int, statistics: Iterable[Statistic[Any]] = (),
        at_once: int | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        prompt = hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).digest()
        recording = PromptRecording(len(tokens), max(window, 1), statistics, prompt)
        chunks = torch.split(torch.tensor([list(tokens)]), at_once or PREFILL_CHUNK, dim=1)  # [1, chunk]
        self.states = LayerStates() if has_states(model.network.config) else None
        attention = counted(recording, model.network)
        fixed = frequencies_of(model.network, len(tokens))
        with torch.inference_mode(), fixed, recording.listening(model.network):
            for chunk in chunks:
                model.before_pass()
                hidden = model.network.model(
                    input_ids=chunk.to(model.device),
                    position_ids=torch.arange(first, first + chunk.shape[1], device=model.device)[None],
                    use_cache=False,
                    past_key_values=self.states,
                    kvdrift_attention=attention,
                )[0]  # [1, chunk, width]
                first += chunk.shape[1]
            # With a device map the last layers may lie on another device than the one that draws tokens.
            self._model, self._last = model, hidden[0, -1:].to(model.device, copy=True)  # [1, width]
        self.entries = len(tokens)
        self.layers: list[PromptLayer] = recording.layers
        self.evictable = [layer for layer in self.layers if layer.terms.window is None]
        self._recording = recording
        self._first_distributions: dict[Sampling, Tensor] = {}
        self.first_distribution_under(model.sampling)

    @property
    def first_distribution(self) -> Tensor:
        """The next-token distribution of position 1, [V], by the model's sampling."""
        return self.first_distribution_under(self._model.sampling)

    def first_distribution_under(self, sampling: Sampling) -> Tensor:
        """Return the next-token distribution of position 1, [V], with another sampling."""
        if sampling not in self._first_distributions:
            head = Head(self._model.network, self._model.device, self._model.logits_dtype, sampling)
            with torch.inference_mode():
                self._first_distributions[sampling] = head.distributions(self._last, head.room(1))[0]
        return self._first_distributions[sampling]

    def forget_statistics(self) -> None:
        """Drop the values gathered for selectors, which may take as much memory as the cache."""
        self._recording.forget()


@contextlib.contextmanager
def frequencies_of(network: Any, entries: int) -> Iterator[None]:
    """In the block, make a RoPE that switches frequencies by length (LongRoPE) use those of ``entries`` tokens.

    A copy of the embedding made inside the block keeps these frequencies, too.
    """
    if rope_switch(network.config) is None:
        yield
        return
    rotary = network.model.rotary_emb
    weight = network.get_input_embeddings().weight
    rotary(weight, torch.tensor([[entries - 1]]).to(weight.device))  # sets the frequencies
    kind, rotary.rope_type = rotary.rope_type, "default"  # which leaves frequencies as they are
    try:
        yield
    finally:
        rotary.rope_type = kind
