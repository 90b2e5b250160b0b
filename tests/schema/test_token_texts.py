"""Characters of several tokens are put together, wherever their bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvdrift.schema.token_texts import shown_texts, text_of_bytes, whole_texts

TEXT = "长城 مرحبا हिन्दी 한국어 e\u0301 👩‍👩‍👧‍👦🏳️‍🌈 𝔘 Zażółć � \\xe9"


def test_texts_are_whole_wherever_bytes_are_cut() -> None:
    data = TEXT.encode()
    for seed in range(50):
        places = np.random.default_rng(seed).permutation(range(1, len(data)))[: seed * len(data) // 50]
        cuts = [0, *np.sort(places).tolist(), len(data)]
        tokens = [text_of_bytes(data[begin:end]) for begin, end in pairwise(cuts)]
        whole, shown = whole_texts(tokens), shown_texts(tokens)
        assert "".join(whole) == TEXT
        assert shown == [text or alone for text, alone in zip(whole, tokens, strict=True)]
        assert "" not in shown


@pytest.mark.parametrize(
    ("tokens", "whole"),
    [
        ([b"\xe9", b"\x95\xbf\xe5", b"\x9f", b"\x8e."], ["", "", "", "长城."]),
        ([b" \xf0", b"\x9f\x98", b"\x80", b"\xe9"], ["", "", " 😀", "\\xE9"]),
        ([b"\xe9", b"\xe9", b"\x95\xbf"], ["\\xE9", "", "长"]),
        ([b"\xe9\x95", b"a", b"\xbf"], ["\\xE9\\x95", "a", "\\xBF"]),
        ([b"\xed", b"\xa0", b"\x80"], ["\\xED", "\\xA0", "\\x80"]),  # half of a surrogate pair, no character
        ([b"\xf4", b"\x90\x80\x80"], ["\\xF4", "\\x90\\x80\\x80"]),  # beyond the last character
        ([b"\\", b"xE9\\", b"x95\\xBF"], ["\\", "xE9\\", "x95\\xBF"]),  # the source text of bytes
        ([b"\\xE9\\x95\\xBF"], ["\\xE9\\x95\\xBF"]),
        ([], []),
    ],
)
def test_bytes_that_make_no_character_stay(tokens: list[bytes], whole: list[str]) -> None:
    assert whole_texts([text_of_bytes(token) for token in tokens]) == whole
