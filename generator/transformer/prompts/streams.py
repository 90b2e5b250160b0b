"""Next-token distributions of the streams of one prompt, or of several side by side, by a transformer.

Whole steps are tried before the first step of their size, to find out whether a row depends on the rows beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.interface import counted
from kvdrift.generator.attention.prompt_reads import with_packed_keys
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer, SharedPrefix, StreamCache
from kvdrift.generator.attention.states import StreamStates
from kvdrift.generator.attention.threads import stay_alone, torch_threads
from kvdrift.generator.codecs.coded_streams import CodedStreams
from kvdrift.generator.coupling.steps import StepIndices
from kvdrift.generator.coupling.streams import SharingOptions, StreamDecoder
from kvdrift.generator.transformer.decoder import Decoder
from kvdrift.generator.transformer.fused.head import Head
from kvdrift.generator.transformer.fused.layers import fused_layers
from kvdrift.generator.transformer.memory import tried_entries, tried_streams
from kvdrift.generator.transformer.prompts.prompt import Prompt
from kvdrift.schema.sampling import FULL_SOFTMAX


@dataclass(frozen=True)
class PromptCaches:
    """The starting point of a prompt's streams: its n entries, the distribution of position 1, [V], and its caches.

    The first cache is the whole prompt; the others are the actions' caches.
    """

    entries: int
    first_distribution: Tensor
    caches: Sequence[StreamCache]


class TransformerStreams(StreamDecoder):
    """Streams of at least one prompt; caches are numbered over all prompts in their order.

    At most ``streams`` can be open at once, and ``parked`` parked. Stream i is row ``attention.slots[i]`` of a step.
    """

    def __init__(
        self, model: Decoder, prompts: Sequence[PromptCaches], streams: int, horizon: int, sharing: SharingOptions,
        parked: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model.eos_tokens, model.device)
        self._model, self._position = model, 0
        self._layers = fused_layers(model.network, sharing.fused)
        self._first_distributions = torch.stack([prompt.first_distribution for prompt in prompts])  # [prompts, V]
        self._entries = [prompt.entries for prompt in prompts]
        self._prompt_of = torch.arange(len(prompts)).repeat_interleave(
            torch.tensor([len(prompt.caches) for prompt in prompts])
        )  # [caches]
        caches = [cache for prompt in prompts for cache in prompt.caches]
        self.attention = SharedPrefix(
            caches, streams, parked, horizon, model.shape.heads, model.rows,
            share_reads=sharing.share_prompt_reads, fused=sharing.fused,
        )  # fmt: skip
        rows = self.attention.rows_of(streams)
        starts = [cache.states for cache in caches if cache.states is not None]
        self._states = (
            StreamStates(starts, streams, rows, parked, taken_back=self.ahead is not None) if starts else None
        )
        self._attend = counted(self.attention, model.network)
        self._head = Head(model.network, model.device, model.logits_dtype, model.sampling)
        self._distributions = self._head.room(rows)
        devices = self.attention.devices | (self._states.devices if self._states is not None else set())
        self._indices = StepIndices({*devices, self._first_distributions.device})
        self._parked = StepIndices(devices)  # sends the copies of streams that were parked while a step was begun
        self._to_send = self.sent
        self._own: dict[str, Tensor] = {}  # sent to the distributions' device by the last ``advance``, by name

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start a stream of each of ``caches``, ascending; return the distributions of position 1, [streams, V].

        Eviction follows prefill, so all caches of a prompt have the same distribution.
        """
        self._position = 0
        self.attention.open(caches)
        if self._states is not None:
            self._states.open(caches)
        device = self._first_distributions.device
        sent = self._indices.send({"prompts": self._prompt_of[list(caches)], "sent": self._to_send})[device]
        self.sent = sent["sent"]
        if len(self._first_distributions) == 1:
            return self._first_distributions.expand(len(caches), -1)
        return self._first_distributions[sent["prompts"]]

    def send(self, indices: Tensor) -> None:
        """Keep ``indices`` until they are sent to the devices, together with the next step's integers."""
        self._to_send = indices

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues stream ``rows[i]``, open or parked."""
        self.attention.select(rows)

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be continued from positions before the one at which they were parked."""
        return self._states is None and self.attention.cuts_back  # states of earlier positions are not kept

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams ``rows`` as the parked streams ``places``."""
        self.attention.park(rows, places)

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
        self._position = 0
        self.attention.rewind()

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, and return the next distributions, [streams, V]."""
        if not len(tokens):
            self._position += 1
            self.attention.length += 1
            return self._first_distributions[:0]
        self.place(tokens)
        distributions = self.distributions()[: len(tokens)]
        self.confirm()
        return distributions

    def place(self, tokens: Tensor) -> None:
        """Append one token to each stream; positions continue from the prompt's true length, whatever was evicted."""
        attention = self.attention
        self._model.before_pass()
        self._position += 1
        fed = torch.zeros(attention.rows, dtype=torch.int64)
        fed[attention.slots] = tokens
        # All integers of the step go to the devices in one copy; vectors of varying length come last.
        indices = self._indices.send({
            "tokens": fed, "positions": self._positions(), "head_rows": self._head_rows(), "sent": self._to_send,
            **self._stream_of_row(), **attention.indices(),
        })  # fmt: skip
        attention.take(indices)
        if self._states is not None:
            self._states.take(indices, attention.rows)
        self._own = indices[self._first_distributions.device]
        self.sent = self._own["sent"]

    @property
    def ahead(self) -> TransformerStreams | None:
        """The decoder itself if it can ``feed``: attention is fused, on one device, and rules are steady; else None."""
        return self if self.attention.repeats and len(self.attention.devices) == 1 else None

    @property
    def bucket(self) -> Hashable:
        """Shapes and addresses of what ``distributions`` reads, but for the fixed weights, caches and suffixes."""
        read = {name: vector for name, vector in self._own.items() if name not in {"source", "target"}}
        version = 0 if self._states is None else self._states.latest
        return self.attention.bucket, version, *((vector.shape, vector.data_ptr()) for vector in read.values())

    def say_once(self, line: str) -> None:
        """Report a line, unless it was reported before for this model."""
        self._model.steps.say_once(line)

    def feed(self, tokens: Tensor) -> None:
        """Append one token, int64 on the distributions' device, to each of the streams of the last ``place``."""
        self._model.before_pass()
        self._position += 1
        self.attention.repeat()
        if self._states is not None:
            self._states.repeat()
        self._own["positions"].add_(1)
        self._own["tokens"].copy_(tokens[self._own["streams"]])

    def distributions(self) -> Tensor:
        """Return the distributions after the last tokens, [rows, V], streams' rows first; valid until the next call.

        All shapes stay those of the last call as long as the numbers of rows, tiles and partial results stay the same.
        """
        with torch.inference_mode():
            hidden = self._hidden_states(self._own["tokens"], self._own["positions"])[self._own["head_rows"]]
            return self._head.distributions(hidden, self._distributions[: len(hidden)])

    def give_up(self) -> None:
        """Undo the last ``feed``."""
        self._position -= 1
        self.attention.take_back()
        if self._states is not None:
            self._states.take_back()

    def confirm(self) -> None:
        """Note that the last tokens stay; streams that were parked since ``feed`` are copied as they were before it."""
        if not self.cuts_back and (copies := self.attention.parked_copies()):
            moved = self._parked.send(copies)
            self.attention.keep_parked(moved)
            if self._states is not None:
                self._states.copy(moved, before=True)
        self.attention.after_step()

    def _hidden_states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the last hidden states, [rows, width], of one new token per row."""
        if self._states is not None:
            self._states.arrange()
        if self._layers is not None:
            return self._layers.hidden_states(tokens, positions, self._attend, self._states)
        output: Tensor = self._model.network.model(
            input_ids=tokens[:, None], position_ids=positions, use_cache=False, past_key_values=self._states,
            kvdrift_attention=self._attend,
        )[0]  # [rows, 1, width]  # fmt: skip
        return output[:, 0].to(self.device)  # with a device map, the last layers may lie elsewhere

    def _positions(self) -> Tensor:
        """Return the positions of the fed tokens: [1, 1] if there is one prompt, else [rows, 1]."""
        attention, after = self.attention, self._position - 1
        if len(self._entries) == 1:
            return torch.full((1, 1), self._entries[0] + after)
        positions = torch.zeros(attention.rows, dtype=torch.int64)
        positions[attention.slots] = torch.tensor(self._entries)[self._prompt_of[attention.stream_caches]] + after
        return positions[:, None]

    def _stream_of_row(self) -> dict[str, Tensor]:
        """Return, as "streams", the stream of each row, int64 [rows], 0 if a row has none; {} if ``ahead`` is None."""
        if self.ahead is None:
            return {}
        streams = torch.zeros(self.attention.rows, dtype=torch.int64)
        streams[self.attention.slots] = torch.arange(len(self.attention.slots))
        return {"streams": streams}

    def _head_rows(self) -> Tensor:
        """Return the row of each stream, int64, padded with the first stream's row to the number of computed rows."""
        slots = self.attention.slots
        return torch.cat([slots, slots[:1].expand(self.attention.rows - len(slots))])


_TRIED_SUFFIXES = 8  # the number of different suffixes
_DISTRIBUTIONS = 64  # compared at a time


def try_steps(
    model: Decoder, prompt: Prompt, entries: int, horizon: int, streams: int, sharing: SharingOptions,
    rules: Sequence[CacheRule | None],
) -> None:  # fmt: skip
    """Find out whether a row of a step depends on the rows beside it, unless steps as large were tried before.

    The prompt gives the shapes of layers; ``entries`` is the length of the longest prompt, and ``rules`` has the rule
    of each cache. The memory of the trial is freed afterwards.
    """
    sizes = tried_entries(entries), horizon, tried_streams(streams, horizon, model.shape.entry_bytes)
    tried: Sequence[CacheRule | None] = _to_try(rules, horizon) or [None]
    for rule in tried:
        of_codec = isinstance(rule, CodedStreams)
        deviation = partial(random_step_deviation, model, prompt, *sizes, sharing, rule)
        kinds = int(rule is not None and not of_codec), int(of_codec)
        model.steps.cover((*sizes, *kinds), partial(_tried, model, deviation))


def _tried(model: Decoder, deviation: Callable[[Sequence[int | None]], float]) -> float:
    """Return the deviation of steps, computed with one thread and with the model's threads.

    If there is a deviation with several threads, only one thread computes from then on, and its own deviation is
    returned. ``deviation`` tries the steps with each of the given numbers of threads.
    """
    steps, most = model.steps, model.most_threads
    largest = deviation((1, most) if most > 1 else (None,))
    if largest and most > 1:
        steps.alone = True
        stay_alone()
        steps.say(
            f"with {most} threads rows of a step depend on each other or on the number of threads, by {largest:.2g} of "
            "the largest probability: so only one thread computes"
        )
        largest = deviation((None,))
    if largest > model.batch_deviation:
        steps.say(
            f"a row of a step depends on the rows beside it, by {largest:.2g} of the largest probability, also with "
            "one thread: the control may diverge; another device or dtype may compute rows independently"
        )
    return largest


def _to_try(rules: Sequence[CacheRule | None], horizon: int) -> list[CacheRule]:
    """Return at most two of the rules that attend in the last step: one of a policy, and one of a codec."""
    attending = [rule for rule in rules if rule and not rule.passes(horizon - 1)]
    kinds = [[rule for rule in attending if isinstance(rule, CodedStreams) is coded] for coded in (False, True)]
    return [max(starts, key=lambda start: start.scores) for starts in kinds if starts]


def random_step_deviation(
    model: Decoder, prompt: Prompt, entries: int, horizon: int, streams: int, sharing: SharingOptions,
    rule: CacheRule | None, threads: Sequence[int | None] = (None,),
) -> float:  # fmt: skip
    """Return ``step_deviation`` with random keys and values, equal in layers of one shape, and ``prompt``'s states.

    The first two caches have ``entries`` entries. The last one has half of them and a rule of the kind of ``rule``,
    unless that is None.
    """
    layers = prompt.layers
    whole, copy, half = (_random_layers(layers, entries, step) for step in (1, 1, 2))
    half_rule = rule and rule.over(-(-entries // 2), prompt.evictable[0].key.shape[0])
    layers_and_rules = ((whole, None), (copy, None), (half, half_rule))
    starts = [StreamCache(cache_layers, prompt.states, rule=its_rule) for cache_layers, its_rule in layers_and_rules]
    caches = PromptCaches(prompt.entries, prompt.first_distribution, starts)
    model = replace(model, sampling=FULL_SOFTMAX)  # greedy distributions would show few deviations, each of size 1
    kernels = TransformerStreams(model, [caches], streams, horizon, sharing)
    kv_heads, size = (max(layer.key.shape[dimension] for layer in layers) for dimension in (0, 2))
    generator = torch.Generator().manual_seed(1)
    suffixes = torch.randn(_TRIED_SUFFIXES, kv_heads, horizon - 1, size, generator=generator)
    return step_deviation(kernels, suffixes, streams, threads)


def step_deviation(
    kernels: TransformerStreams, suffixes: Tensor, streams: int, threads: Sequence[int | None] = (None,)
) -> float:
    """Compare the distributions of equal streams in steps of several sizes, of at most ``streams`` streams.

    The steps are computed with each number of ``threads``; None is the present number.

    ``kernels`` decode three caches: a prompt, a copy of the prompt, and another prompt. ``suffixes`` are the different
    suffixes that streams have before the step, [kinds, KV heads, entries, size]. Returns the largest difference,
    relative to the largest probability; 0 if distributions are equal bit for bit.
    """
    kernels.attention.fill(suffixes)
    kinds, none = len(suffixes), torch.empty(0, dtype=torch.int64)
    known: set[int] = set()
    wanted, deviation = None, 0.0
    for threads_now, count in itertools.product(threads, kernels.attention.counts_to_try(streams)):
        stream = torch.arange(count)
        cache, kind = stream * 3 // count, stream % kinds
        kernels.open(cache.tolist())
        for _ in range(suffixes.shape[2]):
            kernels.advance(none)
        with torch_threads(threads_now):
            distributions = kernels.advance(kind)
        same = torch.where(cache == 2, kinds + kind, kind)  # which distributions should be equal
        wanted = distributions.new_zeros((2 * kinds, distributions.shape[-1])) if wanted is None else wanted
        for row, number in enumerate(same.tolist()):
            if number not in known:
                known.add(number)
                wanted[number] = distributions[row]
        for part, wanted_rows in zip(
            torch.split(distributions, _DISTRIBUTIONS),
            torch.split(same.to(distributions.device), _DISTRIBUTIONS),
            strict=True,
        ):
            deviation = max(deviation, float((part - wanted[wanted_rows]).abs().max() / part.max()))
    return deviation


def _random_layers(layers: Sequence[PromptLayer], entries: int, step: int) -> list[PrefixLayer]:
    """Return layers of prompt entries for a cache, with random keys and values from a fixed seed.

    A layer with a window has as many entries as the window holds. For other layers ``entries`` entries are drawn, and
    every ``step``-th is kept. Layers of one shape have the same entries.
    """
    made: dict[tuple[Any, ...], PrefixLayer] = {}
    layers_made = []
    for layer in layers:
        kv_heads, _, size = layer.key.shape
        held = layer.terms.held(entries)
        kind = layer.key.device, layer.key.dtype, kv_heads, size, layer.terms.window
        if kind not in made:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(2, kv_heads, held, size, generator=generator).to(layer.key.dtype)
            part = drawn if layer.terms.window is not None else drawn[:, :, ::step].contiguous()
            key, value = part.to(layer.key.device, copy=True)
            (made[kind],) = with_packed_keys([PrefixLayer(key, value, layer.terms)])
        layers_made.append(replace(made[kind], terms=layer.terms))
    return layers_made
