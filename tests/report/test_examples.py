"""Texts of examples: characters of several tokens, and signs that are not seen."""

from __future__ import annotations

import pytest

from kvdrift.report.sections.examples import _example, visible


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    """At τ its bytes tell two tokens apart."""
    texts = {1: " \\xE9", 2: "\\x95", 3: "\\xBF", 4: "\\x96"}
    events = [{"t": t, "x_token": x, "y_token": y} for t, x, y in ((1, 1, 1), (2, 2, 4), (3, 3, 2))]
    trajectory = {"action": "a", "tau": 2, "mismatches": 2, "eos_x": None, "eos_y": None, "horizon": 3}
    pairs = _example(trajectory, events, texts.__getitem__, "compressed")["pairs"]
    assert [(pair["x"], pair["y"]) for pair in pairs] == [(" \\xE9", " \\xE9"), ("\\x95", "\\x96"), (" 长", " 閕")]
    assert [(pair["mismatch"], pair["entry"]) for pair in pairs] == [(False, False), (True, True), (True, False)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\u200d", "U+200D"), ("\ufe0f\u200d", "U+FE0FU+200D"), ("👩\u200d", "👩\u200d"), ("a\n\t", "a↵⇥"), ("", "∅")],
)
def test_invisible_signs_are_numbers(text: str, shown: str) -> None:
    assert visible(text) == shown
