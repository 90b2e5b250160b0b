"""Streams whose entries are coded as they leave the residual window: which entries are coded, and when.

Prompt entries are coded once, in place, for all streams of a cache. The exception is a group of keys that begins in the
prompt and ends in the suffixes: its prompt entries stay exact, and the group is read back anew in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvdrift.generator.attention.cache_rules import CacheRule, StreamEntries
from kvdrift.generator.attention.parts import attend_part, attend_prompt, join_parts, with_sinks
from kvdrift.generator.attention.shared_prefix import PrefixLayer


class EntryCoding(ABC):
    """Stores and reads back consecutive entries, independently of the entries before and after them."""

    @abstractmethod
    def read_back(self, keys: Tensor, values: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Store entries of some layers and read them back, in the same shapes and dtype.

        Keys and values are [layers, R, KV heads, entries, size] in the model's dtype; keys are whole groups, or no
        entries. ``layers`` are the numbers of the layers, all of which are on one device.
        """


@dataclass(frozen=True)
class CodedLayer:
    """One layer of a cache: how many prompt entries are coded before decoding, and the exact copies of the others."""

    entries: int  # m
    begun: int  # how many of the last entries are in a group of keys that the suffixes complete
    coded_keys: int  # how many keys are coded before the first token is fed
    coded_values: int  # how many values are coded before the first token is fed
    exact: PrefixLayer  # copies of the other keys and values, [KV heads, entries, size] each
    coded: bool = True  # whether the layer is ever coded; else all of its entries stay as they are

    @classmethod
    def of(cls, held: PrefixLayer, window: int, together: int) -> CodedLayer:
        """Describe a layer that a codec holds, with an exact ``window`` and groups of ``together`` keys."""
        entries = held.key.shape[1]
        values = max(entries - window, 0)
        keys = values - values % together
        exact = PrefixLayer(held.key[:, keys:].clone(), held.value[:, values:].clone())
        return cls(entries, entries % together, keys, values, exact)

    @classmethod
    def never_coded(cls, held: PrefixLayer) -> CodedLayer:
        """Describe a layer whose entries stay as they are."""
        entries = held.key.shape[1]
        return cls(entries, 0, entries, entries, PrefixLayer(held.key[:, :0], held.value[:, :0]), coded=False)


class CodedStreams(CacheRule):
    """Codes entries that left the window, before each step; attends once a group that began in the prompt is coded.

    The last ``window`` entries are exact, and so is the entry of the token being fed. Keys are coded in groups of
    ``together`` consecutive keys, counted from the first kept entry. ``layers`` describe the prompt as coded before
    decoding; ``horizon`` is H.
    """

    unsteady = "a codec codes generated entries in every step"

    def __init__(
        self, coding: EntryCoding, window: int, together: int, layers: Sequence[CodedLayer], horizon: int
    ) -> None:
        self.coding, self._window, self._together, self._layers = coding, window, together, layers
        # If no entry of H - 1 fed tokens is ever coded, a stream's earlier states are cuts of its present state.
        self.cuts_back = horizon - 2 <= window
        self._length = 0  # the length L of the suffixes for which the prompt's entries are coded
        self._coded = {number: (one.coded_keys, one.coded_values) for number, one in enumerate(layers)}
        kinds = {
            n: (one.exact.key.device, one.exact.key.shape, one.entries) for n, one in enumerate(layers) if one.coded
        }
        self._alike = [[n for n, own in kinds.items() if own == kind] for kind in dict.fromkeys(kinds.values())]

    def over(self, entries: int, kv_heads: int) -> CacheRule:  # noqa: ARG002
        """Return a rule without an exact window over other entries; the first fed token completes a group of keys."""
        begun = min(self._together - 1, entries)
        layers = [
            replace(
                one, entries=entries, begun=begun * one.coded, coded_keys=entries - begun * one.coded,
                coded_values=entries, exact=PrefixLayer(one.exact.key[:, :0], one.exact.value[:, :0]),
            )
            for one in self._layers
        ]  # fmt: skip
        return CodedStreams(self.coding, 0, begun + 1, layers, horizon=0)

    def before_step(
        self, prompt: Sequence[Sequence[Tensor]], suffixes: Sequence[Sequence[Tensor]], slots: Sequence[Tensor],
        length: int,
    ) -> None:  # fmt: skip
        """Code what has left the window since the last step: prompt entries, and at most one entry of each suffix.

        Keys are coded once their whole group has left the window; a group that began in the prompt is left to
        ``attend``.
        """
        if length < self._length:
            self._restore(prompt)
        self._length, left = length, self._left(length)
        for layers in self._alike:
            one = self._layers[layers[0]]
            self._code_prompt(prompt, layers, one.entries + left)
            if left > 0:
                grouped = left >= self._together and (one.begun + left) % self._together == 0
                key, value = slice(left - self._together if grouped else left, left), slice(left - 1, left)
                parts = [0, 1] if grouped else [1]
                own = [
                    [_taken(suffixes[layer][part][:, :, span], slots[layer]) for layer in layers]
                    for part, span in enumerate((key, value))
                ]
                read = self._read_back(own, layers)
                for part in parts:
                    for layer, numbers in zip(layers, read[part], strict=True):
                        suffixes[layer][part][:, :, (key, value)[part]].index_copy_(0, slots[layer], numbers)

    def passes(self, length: int) -> bool:
        """Return whether every group that began in the prompt is still exact when suffixes have ``length`` entries."""
        return not self.replaces(length)

    def replaces(self, length: int) -> bool:
        """Return whether any group that began in the prompt is coded when suffixes have ``length`` entries."""
        return any(self._completed(one, length) for one in self._layers)

    def attend(self, entries: StreamEntries, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the prompt, and to each stream's suffix along with the group of keys that began in the prompt."""
        query, key, value = entries.query, entries.suffix_key, entries.suffix_value
        rows, kv_heads, group, size = query.shape
        one, shared = self._layers[entries.layer], entries.prompt_key.shape[1]
        if self._completed(one, key.shape[2]):
            shared -= one.begun
            first, its_values = (
                part[:, shared:].expand(rows, -1, -1, -1) for part in (entries.prompt_key, entries.prompt_value)
            )
            inside = self._together - one.begun
            begun = torch.cat([first, key[:, :, :inside]], 2)
            (read,), _ = self.coding.read_back(begun[None], begun[None, :, :, :0], [entries.layer])
            key, value = torch.cat([read, key[:, :, inside:]], 2), torch.cat([its_values, value], 2)
        joint = attend_part(query, key, value, entries.scaling, softcap=entries.terms.softcap)
        if shared:
            packed = query.transpose(0, 1).reshape(kv_heads, rows * group, size)
            prompt_key, prompt_value = entries.prompt_key[:, :shared], entries.prompt_value[:, :shared]
            output, mass = attend_prompt(packed, prompt_key, prompt_value, entries.scaling, entries.terms.softcap)
            by_rows = output.view(kv_heads, rows, group, size).transpose(0, 1)
            joint = join_parts(joint, (by_rows, mass.view(kv_heads, rows, group).transpose(0, 1)))
        return with_sinks(*joint, entries.terms.sinks).to(query.dtype), scores

    def _left(self, length: int) -> int:
        """How many generated entries have left the window, if suffixes have ``length`` entries.

        The number is negative, -k, while the window still has k entries of the prompt.
        """
        return length - 1 - self._window

    def _completed(self, one: CodedLayer, length: int) -> bool:
        """Whether all entries of the group that began in a layer's prompt have left the window."""
        return one.begun > 0 and one.begun + self._left(length) >= self._together

    def _restore(self, prompt: Sequence[Sequence[Tensor]]) -> None:
        """Restore the prompt entries to what they were before the first token was fed."""
        for number, one in enumerate(self._layers):
            key, value = prompt[number]
            key[:, one.coded_keys :], value[:, one.coded_values :] = one.exact.key, one.exact.value
            self._coded[number] = one.coded_keys, one.coded_values

    def _code_prompt(self, prompt: Sequence[Sequence[Tensor]], layers: Sequence[int], before: int) -> None:
        """Code the prompt entries among the first ``before`` entries, which have left the window.

        ``layers`` are of one device and shape.
        """
        one, (keys, values) = self._layers[layers[0]], self._coded[layers[0]]
        whole = min(before - before % self._together, one.entries - one.begun)
        key, value = slice(keys, max(whole, keys)), slice(values, max(min(before, one.entries), values))
        if key.stop == keys and value.stop == values:
            return
        own = [[prompt[layer][part][None, :, span] for layer in layers] for part, span in enumerate((key, value))]
        for numbers, read in zip(own, self._read_back(own, layers), strict=True):
            for there, back in zip(numbers, read, strict=True):
                there.copy_(back)
        self._coded |= dict.fromkeys(layers, (key.stop, value.stop))

    def _read_back(self, own: Sequence[Sequence[Tensor]], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        keys, values = (torch.stack(list(numbers)) for numbers in own)
        return self.coding.read_back(keys, values, layers)


def _taken(numbers: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of ``numbers`` [slots, ...] at ``slots``, int64 [R]: [R, ...]."""
    return numbers.index_select(0, slots) if numbers.shape[2] else numbers[: len(slots)]
