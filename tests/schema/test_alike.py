"""Names that a misspelt one may stand for."""

from __future__ import annotations

import pytest

from kvdrift.schema.errors import nearest, similar_name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("needle-384-0001", "needle-384-00001"),
        ("needle-0384-12", "needle-384-00012"),
        ("needle-384-00001", "needle-384-00001"),
        ("nedle-384-00012", "needle-384-00012"),
        ("elsewhere", None),
    ],
)
def test_zeros_before_a_number_count_for_nothing(name: str, meant: str | None) -> None:
    """A plain ratio of equal letters prefers needle-384-00012 for the first of these."""
    known = ["needle-384-00012", "needle-384-00001", "100", "1"]
    assert similar_name(name, known) == meant


def test_a_number_keeps_the_zeros_within_it() -> None:
    assert similar_name("0100", ["1", "10", "100"]) == "100"
    assert nearest("x", ["b", "a"]) == "known: a, b"
