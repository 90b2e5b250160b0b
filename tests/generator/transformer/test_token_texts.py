"""Texts of single tokens, in the vocabularies of bytes and of bytes where no piece fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.byte_level import byte_level_tokenizer
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvdrift.generator.documents.answers import Record, find_records
from kvdrift.generator.transformer.files.tokenizer import token_reader, token_texts
from kvdrift.schema.token_texts import whole_texts

TEXTS = {
    "chinese": "请介绍长城。长城",
    "arabic": "مرحبا بالعالم",
    "hindi": "नमस्ते दुनिया",
    "korean": "한국어로 짧은 시",
    "combining": "e\u0301 q\u0323\u0307",
    "joined": "👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪",
    "latin": "Zażółć gęślą jaźń",
    "code": "b'\\xE9\\x95\\xBF' \\xe9 �",
}


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's: letters and ``▁`` for a space, bytes for all else; decoding strips the first space."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F))]
    model = BPE({name: token for token, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)  # noqa: S106
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made)


KINDS = {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer."""
    made = tmp_path_factory.mktemp("tokenizer")
    KINDS[request.param]().save_pretrained(made)
    (made / "config.json").write_text('{"model_type": "llama"}')
    return made


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_single_tokens_make_the_whole_text(folder: Path, name: str) -> None:
    tokenizer, read = PreTrainedTokenizerFast.from_pretrained(folder), token_reader(str(folder))
    assert read is not None
    tokens = tokenizer(TEXTS[name], add_special_tokens=False)["input_ids"]
    assert "".join(whole_texts([read(token) for token in tokens])).strip() == TEXTS[name]


def test_each_byte_has_a_text_of_its_own(folder: Path) -> None:
    """Tokens that are no text by themselves are told apart; one without text is its number."""
    read, texts = token_reader(str(folder)), token_texts(str(folder))
    assert read is not None
    assert texts is not None
    assert {f"\\x{byte:X}" for byte in range(0x80, 0x100)} <= {*texts.values()}
    assert not [text for text in texts.values() if "\ufffd" in text or not text]
    assert all(read(token) == text for token, text in texts.items())
    assert read(max(texts) + 7) == str(max(texts) + 7)


def test_an_answer_of_bytes_has_all_their_tokens(folder: Path) -> None:
    tokenizer, read = PreTrainedTokenizerFast.from_pretrained(folder), token_reader(str(folder))
    assert read is not None
    parts = ["请介绍", "长城", "。", "长城"]
    pieces = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
    ends = [sum(map(len, pieces[:count])) for count in range(5)]
    texts = [read(token) for piece in pieces for token in piece]
    opening = texts[ends[1]] == " "  # Llama 2's begins each text with a space, which belongs to no answer
    places = [(ends[at] + 1 + opening, ends[at + 1]) for at in (1, 3)]
    assert find_records(texts, ["长城"], "all") == [Record(0, 0, first, last) for first, last in places]
