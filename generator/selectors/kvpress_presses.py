"""Which presses of kvpress are pure selections, what they use, and why the others are refused.

A pure selection decides once, after the prompt, which entries each head keeps. It does not change entries, and it is
told how many to keep, the same number for all KV heads of a layer. The tables were read from kvpress 0.5.5.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType

from kvdrift.schema.errors import InputError

VERSION = "0.5.5"


@dataclass(frozen=True)
class Press:
    """What a press uses and promises.

    Attributes:
        hidden: Whether it uses the hidden states of all positions.
        attention: Whether it uses the whole n x n attention.
        window: How many last positions it always keeps, or the name of the option that says so.
        sinks: How many first positions it always keeps, or the name of the option that says so.
        press: The press that it wraps by default; None if it wraps none.
    """

    hidden: bool = False
    attention: bool = False
    window: int | str = 0
    sinks: int | str = 0
    press: str | None = None


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

_HEADS = "gives the heads of a layer different numbers of entries, by masking them in every attention call"
_DECODING = "evicts while decoding, and eviction here follows the prefill"
_TRAINED = "scores by something trained for one model, which it downloads"
_REPLAY = "reads the prompt a second time and gives heads different numbers of entries"
_RATE = "has no retention of its own: how much it keeps follows from a threshold"
_BASE = "is a base class without scores"

REFUSED_PRESSES: Mapping[str, str] = {
    "AdaKVPress": _HEADS,
    "BasePress": _BASE,
    "CAMPress": f"{_DECODING}; it merges values",
    "ComposedPress": "chains presses, each with a retention of its own",
    "CompressionRatioDecodingPress": _DECODING,
    "CriticalAdaKVPress": _HEADS,
    "DMSPress": _RATE,
    "DecodingPress": _DECODING,
    "DuoAttentionPress": _HEADS,
    "ExpectedAttentionStatsPress": _TRAINED,
    "FastKVzipPress": f"{_TRAINED}, and {_HEADS}",
    "FinchPress": "needs a delimiter token in the prompt, and rotates the kept keys to new positions",
    "KVComposePress": _REPLAY,
    "KVPressTextGenerationPipeline": "is a text pipeline and not a press",
    "KVgradPress": _REPLAY,
    "KVzapPress": _TRAINED,
    "KVzipPress": _REPLAY,
    "KeyRerotationPress": "alters the kept keys: it rotates them to new positions",
    "LUKVPress": f"{_TRAINED}, and {_HEADS}",
    "MergingPress": "alters the kept values: evicted ones are merged into them",
    "PerLayerCompressionPress": "takes a ratio for every layer in the place of a retention",
    "PrefillDecodingPress": _DECODING,
    "QFilterPress": _TRAINED,
    "RestoreKVPress": "appends trained entries to the cache",
    "ScorerPress": _BASE,
    "SimLayerKVPress": _RATE,
    "ThinKPress": "alters the kept keys: it zeroes some of their channels",
}


def load_kvpress(name: str = "kvpress") -> ModuleType:
    """Import kvpress, or one of its modules, and undo what the import does to transformers.

    The import wraps every attention function of transformers, for presses that mask single heads; these are refused
    here, and the functions are put back.

    Raises:
        InputError: Kvpress, or something that it needs, is not installed, or its version is another one.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - with kvpress alone

    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        if (found := version("kvpress")) != VERSION:
            raise InputError(f"kvpress {found} is installed; selectors kvpress:NAME need kvpress {VERSION}")
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"selectors kvpress:NAME need kvpress {VERSION}, and '{error.name}' is not installed; "
            f"install both by: make kvpress"
        ) from None
    finally:
        for key, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[key] is not function:
                ALL_ATTENTION_FUNCTIONS.pop(key)  # wrappers lie over what all of transformers shares
            if ALL_ATTENTION_FUNCTIONS.get(key) is not function:
                ALL_ATTENTION_FUNCTIONS[key] = function
