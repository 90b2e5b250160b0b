"""Next-token laws of the streams of one prompt, or of several side by side, by a transformer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.interface import counted
from kvdrift.generator.attention.shared_prefix import PrefixLayer, SharedPrefix
from kvdrift.generator.attention.streams.states import LayerStates, StreamStates
from kvdrift.generator.coupling.step_indices import StepIndices
from kvdrift.generator.coupling.streams import Savings
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.fused.head import Head
from kvdrift.generator.transformer.fused.layers import fused_layers


@dataclass(frozen=True)
class PromptCaches:
    """The starting point of a prompt's streams.

    Attributes:
        entries: n, the prompt's tokens.
        first_law: The law of position 1, [V].
        caches: Layers of the whole prompt and of each action's cache.
        tiles: For each cache the most rows that read it at once; 0 for the usual number.
        rules: For each cache its rule, if any.
        states: For each cache the states of layers without attention after the prompt; None if there are no such
            layers.
    """

    entries: int
    first_law: Tensor
    caches: Sequence[Sequence[PrefixLayer]]
    tiles: Sequence[int]
    rules: Sequence[CacheRule | None]
    states: Sequence[LayerStates | None]


class TransformerKernels:
    """``StreamKernels`` of at least one prompt; the caches of all prompts are numbered through.

    At most ``streams`` can be open at once, and ``parked`` parked.
    """

    def __init__(
        self, model: Decoder, prompts: Sequence[PromptCaches], streams: int, horizon: int, savings: Savings,
        parked: int = 0,
    ) -> None:  # fmt: skip
        self._model, self._position = model, 0
        self._layers = fused_layers(model.network, savings.fused)
        self._first_laws = torch.stack([prompt.first_law for prompt in prompts])  # [prompts, V]
        self._entries = [prompt.entries for prompt in prompts]
        self._prompt_of = torch.arange(len(prompts)).repeat_interleave(
            torch.tensor([len(prompt.caches) for prompt in prompts])
        )  # [caches]
        self._attention = SharedPrefix(
            [cache for prompt in prompts for cache in prompt.caches], streams, parked, horizon, model.rows.multiple,
            model.shape.heads // model.shape.kv_heads, share_reads=savings.share_prompt_reads, fused=savings.fused,
            tiles=[tile for prompt in prompts for tile in prompt.tiles],
            rules=[rule for prompt in prompts for rule in prompt.rules], few=model.rows.few,
            layers=model.rows.layers,
        )  # fmt: skip
        rows = self._attention.rows_of(streams)
        starts = [states for prompt in prompts for states in prompt.states if states is not None]
        self._states = StreamStates(starts, streams, rows, parked) if starts else None
        self._attend = counted(self._attention, model.network)
        self._head = Head(model.network, model.device, model.logits_dtype, model.law)
        self._laws = self._head.room(rows)
        devices = self._attention.devices | (self._states.devices if self._states is not None else set())
        self._indices = StepIndices({*devices, self._first_laws.device})
        self._to_send = self.sent = torch.empty(0, dtype=torch.int64)
        self._own: dict[str, Tensor] = {}  # what the last ``advance`` sent to the laws' device, by name

    @property
    def slots(self) -> Tensor:
        """The row in which each open stream is computed, int64 [streams], on the CPU."""
        return self._attention.slots

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self._model.eos_tokens

    @property
    def device(self) -> str:
        """The device of the laws."""
        return self._model.device

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream for each of ``caches``, which ascend, and return the laws of position 1, [streams, V].

        Eviction follows prefill, so these laws are equal for one prompt.
        """
        self._position = 0
        self._attention.open(caches)
        if self._states is not None:
            self._states.open(caches)
        device = self._first_laws.device
        own = self._indices.send({"prompts": self._prompt_of[list(caches)], "sent": self._to_send})[device]
        self.sent = own["sent"]
        if len(self._first_laws) == 1:
            return self._first_laws.expand(len(caches), -1)
        return self._first_laws[own["prompts"]]

    def send(self, indices: Tensor) -> None:
        """Send integers, int64 of any shape on the CPU, to the laws' device, with what the next step needs there."""
        self._to_send = indices

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues stream ``rows[i]``; higher numbers are parked ones."""
        self._attention.select(rows)

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be continued from earlier positions than that at which they were parked."""
        return self._states is None and self._attention.cuts_back  # of earlier positions no state is left

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams ``rows`` for a later ``select``, as the parked streams ``places``.

        Both are int64 [parked], on the CPU.
        """
        self._attention.park(rows, places)

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
        self._position = 0
        self._attention.rewind()

    def fill(self, contents: Tensor) -> None:
        """Set the suffix of slot s to ``contents[s mod kinds]``, [kinds, KV heads, entries, size], in every layer."""
        self._attention.fill(contents)

    def counts_to_try(self, streams: int) -> list[int]:
        """Return numbers of streams, up to ``streams``, with which steps are tried, the largest first."""
        return self._attention.counts_to_try(streams)

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token, int64 [streams] on the CPU, to each open stream, and return the next laws, [streams, V]."""
        if not len(tokens):
            self._position += 1
            self._attention.skip()
            return self._first_laws[:0]
        self.place(tokens)
        return self.laws()[: len(tokens)]

    def place(self, tokens: Tensor) -> None:
        """Append one token, int64 [streams] on the CPU, to each open stream, of which there is at least one.

        Positions continue from the prompt's true length, however few of its entries a cache holds.
        """
        attention = self._attention
        self._model.before_pass()
        self._position += 1
        fed = torch.zeros(attention.rows, dtype=torch.int64)
        fed[attention.slots] = tokens
        # What the step needs goes to the devices at once; vectors of varying length come last.
        indices = self._indices.send({
            "tokens": fed, "positions": self._positions(), "head_rows": self._head_rows(), "sent": self._to_send,
            **self._stream_of_row(), **attention.indices(),
        })  # fmt: skip
        attention.take(indices)
        if self._states is not None:
            self._states.take(indices, attention.rows)
        self._own = indices[self._first_laws.device]
        self.sent = self._own["sent"]

    @property
    def ahead(self) -> TransformerKernels | None:
        """These kernels, if all layers are fused, and so is attention; else None."""
        return self if self._layers is not None and self._attention.repeats else None

    @property
    def bucket(self) -> Hashable:
        """The shapes and addresses of what ``laws`` reads; those of weights, caches and suffixes never change."""
        read = {name: vector for name, vector in self._own.items() if name not in {"source", "target"}}
        return self._attention.partials, *((vector.shape, vector.data_ptr()) for vector in read.values())

    def feed(self, tokens: Tensor) -> None:
        """Append one token to each open stream, whose tables are those of the last ``place``; send nothing.

        Tokens are int64, on the laws' device: the token of each open stream, then any others.
        """
        self._model.before_pass()
        self._position += 1
        self._attention.repeat()
        self._own["positions"].add_(1)
        self._own["tokens"].copy_(tokens[self._own["streams"]])

    def laws(self) -> Tensor:
        """Return the laws after the last tokens, [rows, V], those of streams first; valid until the next call.

        Every shape is that of the last call as long as the numbers of rows, tiles and partial results are.
        """
        with torch.inference_mode():
            hidden = self._hidden_states(self._own["tokens"], self._own["positions"])[self._own["head_rows"]]
            return self._head.laws(hidden, self._laws[: len(hidden)])

    def give_up(self) -> None:
        """Take the last ``feed`` back, whose tokens the next ``place`` replaces."""
        self._position -= 1
        self._attention.take_back()

    def _hidden_states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the last hidden states, [rows, width], of one new token per row."""
        if self._layers is not None:
            return self._layers.hidden_states(tokens, positions, self._attention)
        output: Tensor = self._model.network.model(
            input_ids=tokens[:, None], position_ids=positions, use_cache=False, past_key_values=self._states,
            kvdrift_attention=self._attend,
        )[0]  # [rows, 1, width]  # fmt: skip
        return output[:, 0].to(self.device)  # with a device map, the last layers may lie elsewhere

    def _positions(self) -> Tensor:
        """Return the positions of the fed tokens: [1, 1] if all rows have the same, else [rows, 1]."""
        attention, after = self._attention, self._position - 1
        if len(self._entries) == 1:
            return torch.full((1, 1), self._entries[0] + after)
        positions = torch.zeros(attention.rows, dtype=torch.int64)
        positions[attention.slots] = torch.tensor(self._entries)[self._prompt_of[attention.stream_cache]] + after
        return positions[:, None]

    def _stream_of_row(self) -> dict[str, Tensor]:
        """Return the number of each row's stream, int64 [rows], 0 in rows without one; nothing if ``ahead`` is None."""
        if self.ahead is None:
            return {}
        streams = torch.zeros(self._attention.rows, dtype=torch.int64)
        streams[self._attention.slots] = torch.arange(len(self._attention.slots))
        return {"streams": streams}

    def _head_rows(self) -> Tensor:
        """Return the rows of the streams, padded to the number of rows that the model computes."""
        slots = self._attention.slots
        return torch.cat([slots, slots[:1].expand(self._attention.rows - len(slots))])
