"""Presses of kvpress (https://github.com/NVIDIA/kvpress) as selectors, by name, such as ``kvpress:ChunkKVPress``.

Selections are made exact:

- kvpress keeps int(n (1 - r)) of n entries for a compression ratio r; r = 1 - (m + 1/2) / n makes it keep m.
- It returns entries in order of score, without positions; the positions are found by the entries' bits, and sorted.
- Some presses keep whole chunks; their selections are filled up to m entries.
- Random presses are seeded.

The inputs of a press are gathered by our own attention; kvpress' hooks are never put on a model.

A press is accepted if it is a pure selection: it decides once, after the prompt, which entries each head keeps; it does
not change entries; and it keeps a given number, the same for all KV heads of a layer. The table of these presses
follows the source of kvpress 0.5.5. All others run with the engine ``transformers``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvdrift.generator.attention.recording import PromptLayer, QueryChunk, Statistic
from kvdrift.generator.selectors.parameters import Value, check_types, unknown
from kvdrift.generator.selectors.selector import Selector
from kvdrift.schema.errors import InputError, OperationError, installing, nearest
from kvdrift.schema.study import TRANSFORMERS

PREFIX = "kvpress:"
VERSION = "0.5.5"


@dataclass(frozen=True)
class Press:
    """The inputs that a press uses, and the positions that it always keeps."""

    hidden: bool = False  # whether it uses the hidden states of all positions
    attention: bool = False  # whether it uses the whole n x n attention
    window: int | str = 0  # how many last positions it always keeps, or the name of the option that says so
    sinks: int | str = 0  # how many first positions it always keeps, or the name of the option that says so
    press: str | None = None  # the press that it wraps by default


PRESSES: Mapping[str, Press] = {
    "BlockPress": Press(hidden=True, press="KeyDiffPress"),
    "CURPress": Press(sinks="num_sinks"),
    "CapPress": Press(hidden=True, sinks="n_sink"),
    "ChunkKVPress": Press(press="SnapKVPress"),
    "ChunkPress": Press(press="KnormPress"),
    "CompactorPress": Press(hidden=True, window="sink_size_end", sinks="sink_size_start"),
    "CriticalKVPress": Press(press="SnapKVPress"),
    "EntropyGatedChunkKVPress": Press(press="SnapKVPress"),
    "ExpectedAttentionPress": Press(hidden=True, sinks="n_sink"),
    "KeyDiffPress": Press(),
    "KnormPress": Press(),
    "LagKVPress": Press(),
    "LeverageScorePress": Press(hidden=True),
    "NonCausalAttnPress": Press(hidden=True),
    "ObservedAttentionPress": Press(hidden=True, attention=True),
    "PyramidKVPress": Press(hidden=True, window="window_size"),
    "RandomPress": Press(),
    "SnapKVPress": Press(hidden=True, window="window_size"),
    "StreamingLLMPress": Press(sinks="n_sink"),
    "TOVAPress": Press(hidden=True, window=1),
}


@dataclass(frozen=True)
class AttentionInput:
    """The inputs of a layer's attention."""

    module: nn.Module  # of attention
    rotary: Any  # a copy of the model's rotary embedding
    hidden: Tensor  # [positions, width]; no positions if no press reads them
    cos: Tensor  # [positions, size]
    sin: Tensor  # [positions, size]


@dataclass(frozen=True)
class AttentionInputs:
    """Statistic: the inputs of a layer's attention; hidden states are among them only if ``hidden``."""

    hidden: bool

    def update(self, gathered: AttentionInput | None, chunk: QueryChunk) -> AttentionInput:
        """Append a chunk's inputs."""
        parts = [chunk.hidden if self.hidden else chunk.hidden[:0], chunk.cos, chunk.sin]
        if gathered is not None:
            earlier = [gathered.hidden, gathered.cos, gathered.sin]
            parts = [torch.cat(both) for both in zip(earlier, parts, strict=True)]
        hidden, cos, sin = parts
        return AttentionInput(chunk.module, chunk.rotary, hidden, cos, sin)


@dataclass(frozen=True)
class KVPress(Selector):
    """A press with all its options, and the press that it wraps, if any, with its options."""

    summary: ClassVar[str] = f"any pure selection of kvpress {VERSION} by its name"
    press: str
    options: tuple[tuple[str, Value | None], ...]
    inner: str | None
    inner_options: tuple[tuple[str, Value | None], ...]

    @property
    def window(self) -> int:
        """How many last positions the press always keeps, by its definition; 0 if it wraps another press."""
        return self._number(PRESSES[self.press].window)

    @property
    def sinks(self) -> int:
        """How many first positions the press always keeps, by its definition."""
        return self._number(PRESSES[self.press].sinks)

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The statistic that gathers the inputs of each layer's attention for the press."""
        return (self._inputs,)

    def working_bytes(self, heads: int, entries: int, item_bytes: int) -> int:
        """Bytes of a layer's attention (scores, masked scores, softmax, mask) if the press needs all of it, else 0."""
        if not PRESSES[self.press].attention:
            return 0
        return entries**2 * (heads * (2 * item_bytes + 4) + item_bytes)  # the softmax is float32

    def budgets(self, kept: int, entries: int, layers: int) -> Sequence[int]:
        """Return m of each layer, layer 0 first.

        PyramidKVPress rounds each m by itself; if their sum is wrong, m is corrected by 1 in the first layers.
        """
        if self.press != "PyramidKVPress":
            return super().budgets(kept, entries, layers)
        press = self.build(1 - kept / entries)
        config = SimpleNamespace(num_hidden_layers=layers)
        rounded = [
            press.get_layer_budget(SimpleNamespace(config=config, layer_idx=number), entries)
            for number in range(layers)
        ]
        over = sum(rounded) - kept * layers
        return [m - (number < over) + (number < -over) for number, m in enumerate(rounded)]

    def keep(self, layer: PromptLayer, kept: int) -> Tensor:
        """Kept positions, int64 [KV heads, kept], ascending within a head.

        A press that keeps whole chunks may never keep exactly m positions, whatever number it is asked for. Then the
        two adjacent numbers are found for which it keeps fewer and more than m. The smaller selection is kept, and
        filled up to m by the first positions that only the larger selection has.
        """
        entries = layer.key.shape[1]
        places = _places(layer)
        chosen: dict[int, list[list[int]]] = {0: [[] for _ in places], entries: [[*range(entries)] for _ in places]}
        low, high, middle = 0, entries, kept
        while high - low > 1:
            chosen[middle] = self._chosen(layer, middle, places)
            if (count := len(chosen[middle][0])) == kept:
                return torch.tensor(chosen[middle], device=layer.key.device)
            low, high = (middle, high) if count < kept else (low, middle)
            middle = (low + high) // 2
        filled = []
        for fewer, more in zip(chosen[low], chosen[high], strict=True):
            added = sorted(set(more) - set(fewer))[: kept - len(fewer)]
            filled.append(sorted(fewer + added))
        return torch.tensor(filled, device=layer.key.device)

    def identity(self) -> dict[str, Any]:
        """Columns of the ``actions`` table; the parameters are all options of the press, defaults included."""
        parameters: dict[str, Any] = {"kvpress": VERSION} | dict(self.options)
        if self.inner is not None:
            parameters["press"] = {self.inner: dict(self.inner_options)}
        return {"kernel": None, "pooling": None, "head_reduction": None, "parameters": parameters}

    @property
    def _inputs(self) -> AttentionInputs:
        named = [PRESSES[name] for name in (self.press, self.inner) if name is not None]
        return AttentionInputs(hidden=any(press.hidden for press in named))

    def _number(self, promise: int | str) -> int:
        value: Any = dict(self.options)[promise] if isinstance(promise, str) else promise
        return int(value)

    def build(self, ratio: float) -> Any:
        """Return kvpress' own object of the press, with compression ratio ``ratio``."""
        module, options = load_kvpress(), dict(self.options)
        if self.inner is None:
            return getattr(module, self.press)(compression_ratio=ratio, **options)
        inner = getattr(module, self.inner)(compression_ratio=ratio, **dict(self.inner_options))
        return getattr(module, self.press)(press=inner, **options)

    def _chosen(self, layer: PromptLayer, kept: int, places: list[dict[bytes, list[int]]]) -> list[list[int]]:
        """Return the positions that the press keeps for each KV head, ascending, if it is asked to keep ``kept``.

        ``places`` is the result of ``_places`` for the layer.
        """
        entries = layer.key.shape[1]
        press = self.build(1 - (kept + 0.5) / entries)
        if self.press == "PyramidKVPress":  # the layer's number is already its budget
            press.get_layer_budget = lambda *_: kept
        inputs = layer.gathered(self._inputs)
        module: Any = copy.copy(inputs.module)
        module.config = copy.copy(module.config)
        module.config.head_dim = module.head_dim  # presses ask for it; a configuration of Qwen2 has none
        vars(module)["rotary_emb"] = inputs.rotary  # of the copy alone, where nn.Module does not register it
        embeddings = {"position_embeddings": (inputs.cos[None], inputs.sin[None])}
        attention = _attention(inputs, layer) if PRESSES[self.press].attention else None
        try:
            with torch.inference_mode(), self._seeded(layer):
                key, value = press.compress(
                    module, inputs.hidden[None], layer.key[None], layer.value[None], attention, embeddings
                )
        except (AssertionError, ValueError, RuntimeError) as error:
            reason = str(error).strip().split("\n", maxsplit=1)[0]
            raise OperationError(
                f"kvpress:{self.press} cannot keep {kept} of {entries} prompt entries: {reason or type(error).__name__}"
            ) from error
        return [
            _found(place, rows, self.press) for place, rows in zip(places, _row_bytes(key[0], value[0]), strict=True)
        ]

    @contextmanager
    def _seeded(self, layer: PromptLayer) -> Iterator[None]:
        """Seed torch by press, options, prompt and layer inside the block, and restore its state afterwards."""
        named = json.dumps([self.press, self.identity(), layer.prompt.hex(), layer.number])
        with torch.random.fork_rng([layer.key.device] if layer.key.is_cuda else []):
            torch.manual_seed(int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big"))
            yield


def build_kvpress(name: str, parameters: Mapping[str, Value]) -> KVPress:
    """Make the selector ``kvpress:PRESS``.

    Args:
        name: ``kvpress:`` and the name of a press.
        parameters: The press' options. If it wraps another press, ``press`` names the inner press, whose options are
            given here too; an option that both presses have is set for the outer press.

    A press that is no pure selection is refused, and so is an option that neither press takes.
    """
    press = name.removeprefix(PREFIX)
    known = _known(press, f"selector '{name}'")
    inner = known.press
    own = dict(parameters)
    if inner is not None:
        inner = str(own.pop("press", inner))
        within = _known(inner, f"press = '{inner}'")
        if within.press is not None or within.attention or inner == "PyramidKVPress":
            raise InputError(
                f"press = '{inner}': cannot be wrapped; name a press that scores the positions of each layer alone, "
                "such as SnapKVPress"
            )
    defaults, inner_defaults = _defaults(press), {} if inner is None else _defaults(inner)
    inner_defaults = {option: value for option, value in inner_defaults.items() if option not in defaults}
    for option in own:
        if option not in defaults and option not in inner_defaults:
            takes = [*defaults, *inner_defaults, *(["press"] if inner else [])]
            raise InputError(unknown(option, f"selector '{name}'", takes))
    check_types(own, defaults | inner_defaults)
    given = [tuple((o, own.get(o, value)) for o, value in part.items()) for part in (defaults, inner_defaults)]
    selector = KVPress(press, given[0], inner, given[1])
    try:
        selector.build(0.5)  # kvpress checks options in constructors
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"selector '{name}': {error}") from None
    return selector


def _known(press: str, where: str) -> Press:
    if press not in PRESSES:
        raise InputError(
            f"{where}: no press of kvpress {VERSION} that only selects entries; others run with "
            f'engine = "{TRANSFORMERS}" under [model]; {nearest(press, PRESSES)}'
        )
    return PRESSES[press]


def _defaults(press: str) -> dict[str, Any]:
    """The options of a press and their defaults, but for ``compression_ratio`` and ``press``, which kvdrift sets."""
    signature = inspect.signature(getattr(load_kvpress(), press))
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in ("compression_ratio", "press") and not name.startswith("_")
    }


def _attention(inputs: AttentionInput, layer: PromptLayer) -> Tensor:
    """The layer's whole attention [1, heads, n, n], by transformers' eager implementation."""
    from transformers.models.llama.modeling_llama import (  # noqa: PLC0415 - code of models, which few selectors need
        apply_rotary_pos_emb,
        eager_attention_forward,
    )

    query = load_kvpress("kvpress.utils").get_prerope_query_states(inputs.module, inputs.hidden[None])
    query, _ = apply_rotary_pos_emb(query, query, inputs.cos[None], inputs.sin[None])
    entries = layer.key.shape[1]
    later = torch.full((entries, entries), torch.finfo(query.dtype).min, device=query.device, dtype=query.dtype).triu(1)
    weights: Tensor
    _, weights = eager_attention_forward(
        inputs.module, query, layer.key[None], layer.value[None], later[None, None], layer.scaling
    )
    return weights


def _row_bytes(key: Tensor, value: Tensor) -> Iterator[list[bytes]]:
    """Yield for each KV head a list with the bits of every entry, its key and value together."""
    for rows in torch.cat([key, value], dim=-1).contiguous().view(torch.uint8).cpu().numpy():
        yield [row.tobytes() for row in rows]


def _places(layer: PromptLayer) -> list[dict[bytes, list[int]]]:
    """Return for each KV head a dict from an entry's bits to its positions; equal entries have several positions."""
    places = []
    for rows in _row_bytes(layer.key, layer.value):
        place: dict[bytes, list[int]] = defaultdict(list)
        for position, row in enumerate(rows):
            place[row].append(position)
        places.append(dict(place))
    return places


def _found(places: dict[bytes, list[int]], rows: list[bytes], press: str) -> list[int]:
    """Return the positions of the entries whose bits are ``rows``, ascending; of equal entries, the first ones."""
    taken: dict[bytes, int] = defaultdict(int)
    found = []
    for row in rows:
        if len(places.get(row, ())) <= taken[row]:
            raise OperationError(
                f"kvpress:{press} returned an entry that is not one of the prompt's; a press must keep entries "
                "unchanged: take another press"
            )
        found.append(places[row][taken[row]])
        taken[row] += 1
    return sorted(found)


def load_kvpress(name: str = "kvpress") -> ModuleType:
    """Import kvpress, or one of its modules, and undo its changes to transformers.

    The import wraps every attention function of transformers, for presses that mask single heads. The functions are
    put back: the engine ``transformers`` wraps them around the calls of a side with a press. If something that kvpress
    needs is missing, an error names it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - with kvpress alone

    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        if (found := version("kvpress")) != VERSION:
            raise InputError(
                f"kvpress {found} is installed; presses need kvpress {VERSION}: pip install --no-deps "
                f"kvpress=={VERSION}"
            )
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"presses need kvpress {VERSION}, and '{error.name}' is not installed; "
            f"install both by: {installing('kvpress')} && pip install --no-deps kvpress=={VERSION}"
        ) from None
    finally:
        for key, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[key] is not function:
                ALL_ATTENTION_FUNCTIONS.pop(key)  # wrappers lie over what all of transformers shares
            if ALL_ATTENTION_FUNCTIONS.get(key) is not function:
                ALL_ATTENTION_FUNCTIONS[key] = function
