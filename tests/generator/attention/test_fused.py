"""Fused attention of decoding streams: its kernels compile, and its plain forms agree with today's path."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from fixtures.decoding_attention import Streams, case_faults
from fixtures.pretend_device import SECOND, TwoDevices

from kvdrift.generator.attention import fused, parts, tables
from kvdrift.generator.attention.holding import AsComputed
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.coupling.distributions import fused_fault
from kvdrift.generator.selectors import Recent
from kvdrift.generator.transformer.prompts.eviction import evict

PLAIN_FORMS = fused.plain_prompt_attention, fused.plain_suffix_attention
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 entries."""
    for module in (parts, tables, fused):
        monkeypatch.setattr(module, "CHUNK", 64)


@DTYPES
@pytest.mark.parametrize(
    ("entries", "counts", "group", "size", "lengths"),
    [
        ([63, 64, 65], [1, 1, 1], 1, 16, [[63, 0], [1, 64], None]),
        ([300, 130, 1], [5, 40, 2], 4, 16, [[129, 300], [130, 64], [0, 1]]),
        ([200, 10], [3, 20], 7, 40, [[64, 200], [10, 3]]),
    ],
)
@pytest.mark.usefixtures("short_chunks")
def test_plain_forms_are_the_softmax_over_all_entries(
    entries: list[int], counts: list[int], group: int, size: int, lengths: Any, dtype: torch.dtype, tolerance: float
) -> None:
    """Bit for bit the same whatever streams are beside one.

    KV heads have m entries each, and then ``lengths``: a head fills a chunk, begins one, lacks one, or has no entries.
    """
    for uneven in ((), lengths):
        assert not case_faults(Streams(entries, counts, group, size, dtype, uneven), *PLAIN_FORMS, tolerance)


@DTYPES
@pytest.mark.parametrize(
    "terms",
    # A window ends in a suffix, with it, in the last chunk, between chunks, and in the first chunk.
    [
        {"window": 20}, {"window": 41, "with_sinks": True}, {"window": 60, "softcap": 2.0, "with_sinks": True},
        {"window": 41 + 64}, {"window": 41 + 150, "softcap": 2.0}, {"softcap": 2.0, "with_sinks": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("short_chunks")
def test_plain_forms_have_a_layers_terms(terms: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    assert not case_faults(Streams([192, 130, 1], [5, 40, 2], dtype=dtype, **terms), *PLAIN_FORMS, tolerance)


def test_a_heads_entries_lie_one_after_the_other_whatever_a_codec_returns() -> None:
    """The kernels read them by address; plain forms would not notice."""

    class _ByChannels(AsComputed):
        def hold(self, layer: PrefixLayer) -> PrefixLayer:
            return PrefixLayer(*(part.mT.contiguous().mT for part in (layer.key, layer.value)))

    key, value, query = torch.randn(3, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    with TwoDevices():
        layer = PromptLayer(*(part.to(SECOND) for part in (key, value, query)), scaling=0.25)
        held = evict([layer], Recent(), 30, [_ByChannels()]).layers[0]
        kept = evict([layer], Recent(), 30).layers[0]
        for one, other in zip((held.key, held.value), (kept.key, kept.value), strict=True):
            assert one.stride() == (30 * 16, 16, 1)
            assert torch.equal(one.cpu(), other.cpu())


# --- The kernels ------------------------------------------------------------------------------------------------------


def test_a_machine_that_cannot_build_them_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:1")
    monkeypatch.setattr(fused, "attention_fault", lambda _: "RuntimeError: Failed to find C compiler.")
    assert not fused.are_fused([cuda], wanted=True)
    monkeypatch.setattr(fused, "attention_fault", lambda _: None)
    assert fused.are_fused([cuda], wanted=None)
    assert not fused.are_fused([cuda], wanted=False)
    assert not fused.are_fused([cuda, torch.device("cpu")], wanted=None)


@pytest.mark.parametrize("wrong", ["prompt", "suffix", None])
def test_a_kernel_that_is_wrong_is_not_used(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(*given: Any) -> list[torch.Tensor]:
        return [part * (1.001 if wrong == "prompt" else 1) for part in fused.plain_prompt_attention(*given)]

    def suffix(*given: Any) -> torch.Tensor:
        return fused.plain_suffix_attention(*given) * (1.001 if wrong == "suffix" else 1)

    monkeypatch.setattr(fused, "_prompt_on_cuda", prompt)
    monkeypatch.setattr(fused, "_suffix_on_cuda", suffix)
    assert (fused.attention_fault.__wrapped__(torch.device("cpu")) is None) == (wrong is None)


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("kvdrift.generator.attention.triton_kernels", fused.attention_fault),
        ("kvdrift.generator.coupling.fused_sums", fused_fault),
    ],
)
def test_without_triton_none_is_used(module: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    parent, _, name = module.rpartition(".")
    monkeypatch.delattr(f"{parent}.{name}", raising=False)
    assert fault.__wrapped__(torch.device("cpu")) == "triton is not installed"
