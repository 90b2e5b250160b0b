"""The tokenizer and chat template of a GGUF file equal those of the Hugging Face tokenizer that it was written from."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fixtures.byte_level import byte_level_tokenizer
from fixtures.chat_models import CHATML
from fixtures.gguf_models import write_random_llama
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study
from transformers import PreTrainedTokenizerFast

import kvdrift
from kvdrift.dry_run.description import end_lines
from kvdrift.generator.engines.registry import engine_model
from kvdrift.generator.llama_cpp.gguf import GgufTokenizer, gguf_tokenizer_sha256, load_gguf_tokenizer
from kvdrift.generator.transformer.files.tokenizer import load_tokenizer, text_decoder, token_reader, token_texts
from kvdrift.schema.token_texts import whole_texts

pytestmark = pytest.mark.llama_cpp

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = (
    "One of the special magic numbers is: 4711.", "  two  spaces,\ttabs\nand\n\nlines", "naïve café, Ωμέγα, 你好 🙂",
    "<bos>not text<eos>", "don't 'quote' x=[1,2.5]; 1,234,567", "",
)  # fmt: skip
STUDY = """
[study]
name = "texts"
horizon = 8
seed = 3

[model]
engine = "llama.cpp"
id = "model.gguf"
settings = { threads = 1 }

[[documents]]
source = "jsonl"
path = "prompts.jsonl"
chat_template = true
length = 200
stratum = "texts"
development = 2
evaluation = 4

[[actions]]
name = "q8_0"
settings = { type_k = "q8_0", type_v = "q8_0" }

[plan]
baseline = "q8_0"
primary = ["mismatch"]
replicates = 4
documents = 4
development_replicates = 2
draws = 200
exploratory_draws = 100
"""


@pytest.fixture(scope="module")
def original() -> PreTrainedTokenizerFast:
    made = byte_level_tokenizer()
    made.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    made.chat_template = CHAT
    return made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, original: PreTrainedTokenizerFast) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("bpe") / "model.gguf", head_size=32, tokenizer=original)


@pytest.fixture(scope="module")
def own(file: Path) -> GgufTokenizer:
    found = load_gguf_tokenizer(file)
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_texts_are_those_of_the_original(
    own: GgufTokenizer, original: PreTrainedTokenizerFast, text: str
) -> None:
    ids = own(text, add_special_tokens=False)["input_ids"]
    assert ids == original(text, add_special_tokens=False)["input_ids"]
    assert own.decode(ids) == original.decode(ids, clean_up_tokenization_spaces=False)
    plain = original.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert own.decode(ids, skip_special_tokens=True) == plain


def test_the_chat_template_is_the_files_own(own: GgufTokenizer, original: PreTrainedTokenizerFast) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which number?"}]
    for opened in (False, True):
        options = {"tokenize": False, "add_generation_prompt": opened}
        assert own.apply_chat_template(conversation, **options) == original.apply_chat_template(conversation, **options)


def test_what_reads_tokenizers_takes_the_files(file: Path, original: PreTrainedTokenizerFast) -> None:
    assert load_tokenizer(str(file)).get_vocab() == original.get_vocab()
    reader, decoder, texts = token_reader(str(file)), text_decoder(str(file)), token_texts(str(file))
    assert reader is not None
    assert decoder is not None
    assert texts is not None
    ids = original("special magic numbers")["input_ids"]
    assert "".join(map(reader, ids)) == "".join(texts[token] for token in ids) == "special magic numbers"
    assert decoder([(*ids, original.eos_token_id)]) == ["special magic numbers"]
    parts = [reader(token) for token in original("长")["input_ids"]]
    assert (parts, whole_texts(parts)) == (["\\xE9", "\\x95", "\\xBF"], ["", "", "长"])
    assert reader(len(texts) + 7) == str(len(texts) + 7)


def test_another_template_is_another_tokenizer(tmp_path: Path, file: Path, original: PreTrainedTokenizerFast) -> None:
    original.chat_template = CHAT + " "
    other = write_random_llama(tmp_path / "other.gguf", head_size=32, tokenizer=original)
    original.chat_template = CHAT
    again = write_random_llama(tmp_path / "again.gguf", head_size=32, tokenizer=original)
    assert gguf_tokenizer_sha256(again) == gguf_tokenizer_sha256(file) != gguf_tokenizer_sha256(other)


def test_prompts_of_text_go_through_the_files_tokenizer(
    tmp_path: Path, file: Path, original: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "model.gguf").symlink_to(file)
    asked = [f"One of the special magic numbers is: {n}. Which?" for n in range(8)]
    rows: list[dict[str, Any]] = [
        {"id": f"d{n}", "messages": [{"role": "user", "content": text}]} if n % 2 else {"id": f"d{n}", "prompt": text}
        for n, text in enumerate(asked)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "study.toml").write_text(STUDY)
    run = run_of(load_study(tmp_path / "study.toml"), tmp_path / "store")
    finish(run)
    for document in chain(*(run.material.of_split(split) for split in ("development", "evaluation"))):
        shown = original.apply_chat_template(
            [{"role": "user", "content": asked[int(document.doc[1:])]}], tokenize=False, add_generation_prompt=True
        )
        assert list(document.tokens) == original(shown, add_special_tokens=False)["input_ids"]
    with kvdrift.open(tmp_path / "store") as views:
        texts = views.sql("select count(*), count(text) from tokens").fetchall()
        turns = views.sql("select distinct turns.role from (select unnest(turns) as turns from prompts)").fetchall()
    assert sorted(turns) == [("assistant",), ("user",)]
    assert texts[0][0] == texts[0][1] > 0


@pytest.mark.parametrize(("template", "named"), [(CHAT, "<eos>"), (CHATML, "<|im_end|>")])
def test_texts_end_where_llama_cpp_ends_generation(tmp_path: Path, template: str, named: str) -> None:
    """All its ends of generation, the template's first; the library knows ``<|im_end|>`` by its name."""
    made = byte_level_tokenizer()
    made.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "additional_special_tokens": ["<|im_end|>"]})
    made.chat_template = template
    write_random_llama(tmp_path / "model.gguf", head_size=32, tokenizer=made)
    rows = [{"id": f"d{n}", "prompt": f"Which number? {n}"} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "study.toml").write_text(STUDY)
    study = load_study(tmp_path / "study.toml")
    ids = made.get_vocab()
    ends = engine_model(study).ends
    assert set(ends.tokens) == {ids["<eos>"], ids["<|im_end|>"]}
    assert ends.tokens[0] == ids[named]
    assert "the chat template" in ends.places[ids[named]]
    (line,) = end_lines(study)
    assert f"{ids[named]} '{named}' (the chat template, " in line
    (tmp_path / "study.toml").write_text(STUDY.replace("seed = 3", 'seed = 3\neos = ["<|im_end|>"]'))
    assert engine_model(load_study(tmp_path / "study.toml")).ends.tokens == (ids["<|im_end|>"],)
