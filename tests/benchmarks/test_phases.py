"""Phases of decoding are measured in processes of their own, whose failures are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.phases import NAMES, measure_phase
from benchmarks.roofline import Peaks


def test_why_another_commit_cannot_decode_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working tree whose benchmark raises."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "generation.py").write_text("raise ValueError('no such case')")
    monkeypatch.setattr("benchmarks.phases.HERE", tmp_path)
    case = Case(layers=1, width=8, inner_width=8, heads=1, kv_heads=1, vocabulary=9, entries=9, replicates=1, horizon=2)
    with pytest.raises(SystemExit, match=r"(?s)the code of .* failed:.*ValueError: no such case"):
        measure_phase(case, NAMES[0], Peaks(1, 1), None, 1)
