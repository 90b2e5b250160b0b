"""Steps of decoding: their least work, computed by hand for a large model, and the bound; and why one cannot be measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import PRESETS, Case, model_shape
from benchmarks.steps import NAMES, Peaks, StepWork, measure_peaks, measure_phase, step_work

LARGE = PRESETS["llama-8b-32k"][0]
ENTRIES = [32_768, 16_384, 16_384, 512]


def test_a_step_of_a_large_model() -> None:
    """Llama-3.1-8B in bf16, n = 32k, K = 64 and 3 actions, when all 448 streams are apart.

    7.5e9 weights without the embedding; 128 KiB an entry; 448 logits of 8 bytes and 832 probabilities that are read
    again; 64 references and 128 compressed streams an action, with 32 layers x 32 heads x 128 numbers.
    """
    work = step_work(model_shape(LARGE), ENTRIES, [64, 128, 128, 128], 64, 192)
    assert work.bytes["weights"] == pytest.approx(15.0e9, rel=0.005)
    assert work.bytes["prompts"] == pytest.approx(8.7e9, rel=0.01)
    assert work.bytes["suffixes"] == pytest.approx(3.8e9, rel=0.02)
    assert work.bytes["logits"] == 128_256 * (448 * 8 + 832 * 4)
    assert work.products["weights"] == pytest.approx(6.7e12, rel=0.01)
    assert work.products["prompts"] == pytest.approx(3.3e12, rel=0.02)
    assert work.products["suffixes"] == 448 * 64 * 4 * 32 * 32 * 128


def test_few_streams_wait_for_bytes_and_many_for_products() -> None:
    """An H100's 3.35 TB/s and 989 TFLOP/s: 7 ms at the start and 10 when all are apart, as was estimated."""
    peaks = Peaks(3.35e12, 989e12)
    start, diverged = (
        step_work(model_shape(LARGE), ENTRIES, streams, 64, pairs).seconds(peaks)
        for streams, pairs in (([1, 1, 1, 1], 3), ([64, 128, 128, 128], 192))
    )
    assert start == pytest.approx(0.0071, rel=0.02)
    assert diverged == pytest.approx(0.0103, rel=0.02)
    work = StepWork(
        {"weights": 1, "prompts": 2, "suffixes": 3, "logits": 4}, {"weights": 5, "prompts": 6, "suffixes": 7}
    )
    assert work.seconds(Peaks(10, 2)) == 9
    assert work.seconds(Peaks(1, 2)) == 10


def test_peaks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.steps.REPETITIONS", 1)
    monkeypatch.setattr("benchmarks.steps.CPU_SIZES", (2**20, 64))
    peaks = measure_peaks("cpu", "float32", 1)
    assert 2**20 < peaks.bytes_per_second < 2**50
    assert 2**20 < peaks.flops_per_second < 2**50


def test_why_another_commit_cannot_decode_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working tree whose benchmark raises."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "generation.py").write_text("raise ValueError('no such case')")
    monkeypatch.setattr("benchmarks.steps.HERE", tmp_path)
    case = Case(layers=1, width=8, inner_width=8, heads=1, kv_heads=1, vocabulary=9, entries=9, replicates=1, horizon=2)
    with pytest.raises(SystemExit, match=r"(?s)the code of .* failed:.*ValueError: no such case"):
        measure_phase(case, NAMES[0], Peaks(1, 1), None, 1)
