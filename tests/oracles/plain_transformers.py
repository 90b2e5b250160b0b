"""Decoding with transformers and kvpress as their users write it, without anything of kvdrift: the logits of a text.

Prefill and positions follow ``KVPressTextGenerationPipeline`` of kvpress; ``cache_position`` is passed, since hooks of
kvpress ask for it and transformers 5.23 passes it no longer. Logits of the prompt's last token alone are computed, as
``generate`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def plain_logits(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], make_press: Callable[[], Any] | None = None,
    make_cache: Callable[[], Any] = DynamicCache, seeds: Sequence[int] = (),
) -> NDArray[np.float32]:  # fmt: skip
    """Return the logits after the prompt and after each of ``tokens``, [1 + tokens, V], in one thread.

    ``seeds``, if given, are set before each call, for presses that draw.
    """
    cache, press, entries = make_cache(), None if make_press is None else make_press(), len(prompt)
    before, rows = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), nullcontext() if press is None else masking_by_kvpress():
            _seed(seeds, 0)
            with press(model) if press is not None and _name(press) not in _DECODING_ALONE else nullcontext():
                ids, place = torch.tensor([[*prompt]]), torch.arange(entries)
                output = model(input_ids=ids, past_key_values=cache, cache_position=place, logits_to_keep=1)
                rows.append(output.logits[0, -1])
            first = cache.get_seq_length() if _name(press) == "KeyRerotationPress" else entries
            decoding = _name(press) in _DECODING or getattr(press, "decoding", False)
            with press(model) if decoding else nullcontext():
                for number, token in enumerate(tokens):
                    _seed(seeds, 1 + number)
                    output = model(
                        input_ids=torch.tensor([[token]]), past_key_values=cache,
                        position_ids=torch.tensor([[first + number]]),
                        cache_position=torch.tensor([entries + number]),
                    )  # fmt: skip
                    rows.append(output.logits[0, -1])
    finally:
        torch.set_num_threads(before)
    return torch.stack(rows).numpy()


_DECODING_ALONE = ("DecodingPress", "CompressionRatioDecodingPress", "CAMPress")
_DECODING = (*_DECODING_ALONE, "PrefillDecodingPress")


@contextmanager
def masking_by_kvpress() -> Iterator[None]:
    """Wrap every attention function of transformers inside the block, as the import of kvpress does for good."""
    from kvpress.attention_patch import attention_patch  # noqa: PLC0415 - `make kvpress` installs it

    before = dict(ALL_ATTENTION_FUNCTIONS)
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = attention_patch(function)
    try:
        yield
    finally:
        for name, function in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = function


def _name(press: Any) -> str:
    return type(press).__name__


def _seed(seeds: Sequence[int], number: int) -> None:
    if seeds:
        torch.manual_seed(seeds[number])
