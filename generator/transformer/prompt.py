"""Transformers as ``StreamKernels``: one prefill, one compact cache per action, streams that share their prompt."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from generator.actions import Action
from generator.attention.recording import PromptLayer, PromptRecording
from generator.attention.shared_prefix import PrefixLayer, SharedPrefix
from generator.attention.statistics import Statistic
from generator.coupling.streams import Savings
from generator.transformer.eviction import CompactCache, evict, kept_entries
from generator.transformer.memory import DOUBLE_VOCABULARY, PREFILL_CHUNK, available_bytes, replicates_within
from schema.document import Document

if TYPE_CHECKING:  # models make prepared prompts
    from generator.transformer.loading import LoadedModel

_HEAD_ROWS = 256  # whose logits a CPU computes at once: more do not fit its cache


class Prompt:
    """One prefilled prompt: what selectors see of every layer, and the law of position 1."""

    def __init__(
        self, model: LoadedModel, tokens: Sequence[int], window: int, statistics: Iterable[Statistic[Any]] = ()
    ) -> None:
        prompt = hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).digest()
        recording = PromptRecording(len(tokens), max(window, 1), statistics, prompt)
        chunks = torch.split(torch.tensor([list(tokens)]), PREFILL_CHUNK, dim=1)
        first = 0
        with torch.inference_mode(), recording.gathering.listening(model.network):
            for chunk in chunks:
                hidden = model.network.model(
                    input_ids=chunk.to(model.device),
                    position_ids=torch.arange(first, first + chunk.shape[1], device=model.device)[None],
                    use_cache=False,
                    kvdrift_attention=recording,
                )[0]
                first += chunk.shape[1]
            logits = model.network.lm_head(hidden[:, -1:])
        self.entries = len(tokens)
        self.layers: list[PromptLayer] = recording.layers
        self._gathering = recording.gathering
        self.first_law = _law(logits[0, -1])

    def forget_statistics(self) -> None:
        """Let go of what selectors had gathered, once they have chosen: it may take as much room as the cache."""
        self._gathering.forget()


class PreparedPrompt:
    """A prefilled prompt and one compact cache per action; ``generator.generation.PreparedDocument``."""

    def __init__(self, model: LoadedModel, document: Document, actions: Sequence[Action], horizon: int) -> None:
        kept = [
            kept_entries(action.selector, action.retention, document.prompt_tokens, _where(action, document))
            for action in actions
        ]
        self._model, self._horizon = model, horizon
        began = time.perf_counter()
        selectors = [
            action.selector for action, m in zip(actions, kept, strict=True) if m < document.prompt_tokens
        ]  # the others keep everything, whatever the prompt
        self._prompt = Prompt(
            model,
            document.tokens,
            window=max((selector.window for selector in selectors), default=0),
            statistics=[statistic for selector in selectors for statistic in selector.statistics],
        )
        shared = (time.perf_counter() - began) / len(actions)
        evicted: dict[str, CompactCache] = {}
        self._caches: list[CompactCache] = []
        self._seconds: list[float] = []
        for action, m in zip(actions, kept, strict=True):
            began = time.perf_counter()
            if action.name not in evicted:
                evicted[action.name] = evict(self._prompt.layers, action.selector, m)
            self._caches.append(evicted[action.name])
            self._seconds.append(shared + time.perf_counter() - began)
        self._prompt.forget_statistics()

    def kernels(self, streams: int, savings: Savings) -> TransformerKernels:
        """See ``PreparedDocument``; kernels share the prompt's and the caches' memory."""
        return TransformerKernels(self._model, self._prompt, self._caches, streams, self._horizon, savings)

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """See ``PreparedDocument``: as many as the memory that is left now has room for."""
        needed = self._model.shape.replicate_bytes(actions, self._horizon, estimator)
        return replicates_within(available_bytes(self._model.device), needed)

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """See ``PreparedDocument``; resident bytes are those before step 1, of one stream per replicate."""
        compact = self._caches[number - 1]
        stored = compact.payload_bytes + compact.index_bytes + compact.metadata_bytes
        suffix = sum(
            (layer.key.nbytes + layer.value.nbytes) // layer.key.shape[1] * self._horizon
            for layer in self._prompt.layers
        )
        return {
            "prompt_entries": self._prompt.entries,
            "kept_entries": compact.kept_entries,
            "payload_bytes": compact.payload_bytes,
            "index_bytes": compact.index_bytes,
            "metadata_bytes": compact.metadata_bytes,
            "resident_bytes": stored + suffix * streams,
            "kept_sha256": list(compact.kept_sha256),
            "prefill_seconds": self._seconds[number - 1],
        }


def _where(action: Action, document: Document) -> str:
    return f"action '{action.name}', document '{document.doc}'"


class TransformerKernels:
    """``StreamKernels`` of one document: cache 0 is the whole prompt, cache a the a-th compact one."""

    def __init__(
        self,
        model: LoadedModel,
        prompt: Prompt,
        caches: Sequence[CompactCache],
        streams: int,
        horizon: int,
        savings: Savings,
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._position = prompt.entries
        whole = tuple(PrefixLayer(layer.key, layer.value) for layer in prompt.layers)
        self._attention = SharedPrefix(
            [whole, *(cache.layers for cache in caches)],
            streams,
            horizon,
            model.rows.multiple,
            share_reads=savings.share_prompt_reads,
        )
        self._laws = prompt.first_law.new_empty((streams + model.rows.multiple, len(prompt.first_law)))

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """EOS tokens of the model's generation configuration."""
        return self._model.eos_tokens

    @property
    def device(self) -> str:
        """The model's device."""
        return self._model.device

    def open(self, caches: Sequence[int]) -> Tensor:
        """See ``StreamKernels.open``: eviction follows prefill, so position 1 has one law for all."""
        self._position = self._prompt.entries
        self._attention.open(caches)
        return self._prompt.first_law.expand(len(caches), -1)

    def select(self, rows: Tensor) -> None:
        """See ``StreamKernels.select``; where nothing changes nothing is copied."""
        self._attention.select(rows)

    def park(self, rows: Tensor) -> None:
        """See ``StreamKernels.park``."""
        self._attention.park(rows)

    def rewind(self) -> None:
        """See ``StreamKernels.rewind``."""
        self._position = self._prompt.entries
        self._attention.rewind()

    def advance(self, tokens: Tensor) -> Tensor:
        """See ``StreamKernels.advance``; positions go on from the prompt's true length."""
        attention, network = self._attention, self._model.network
        attention.next_position()
        self._position += 1
        if not len(tokens):
            return self._laws[:0]
        fed = torch.zeros(attention.rows, dtype=torch.int64)
        fed[attention.slots] = tokens
        with torch.inference_mode():
            hidden = network.model(
                input_ids=fed[:, None].to(self.device),
                position_ids=torch.full((1, 1), self._position - 1, device=self.device),
                use_cache=False,
                kvdrift_attention=attention,
            )[0].to(self.device)  # with a device map, the last layers may lie elsewhere
            return self._stream_laws(hidden[:, 0])

    def _stream_laws(self, hidden: Tensor) -> Tensor:
        """Laws of the streams, from the slots' last hidden states."""
        slots = self._attention.slots
        filled = torch.cat([slots, slots[:1].expand(-len(slots) % self._model.rows.multiple)])
        hidden = hidden[filled.to(self.device)]
        laws = self._laws[: len(filled)]
        # Elsewhere than on a CPU products of other numbers of rows may round differently: there all go together.
        at_once = _HEAD_ROWS if hidden.device.type == "cpu" else len(filled)
        for rows, some in zip(torch.split(hidden, at_once), torch.split(laws, at_once), strict=True):
            torch.softmax(self._model.network.lm_head(rows).to(self.device), -1, dtype=laws.dtype, out=some)
        return laws[: len(slots)]


def _law(logits: Tensor) -> Tensor:
    """Softmax over the whole vocabulary at temperature 1."""
    dtype = torch.float64 if logits.shape[-1] <= DOUBLE_VOCABULARY else torch.float32
    return logits.softmax(-1, dtype=dtype)
