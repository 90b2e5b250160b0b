"""Where a prompt begins: one BOS, whoever writes it, of transformers' tokenizers and of GGUF files.

Inputs reported of other programs are named by repository and number; case 03 is the first of them.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fixtures.chat_tokenizers import chat_tokenizer, family_tokenizer
from fixtures.gguf_models import write_random_llama
from transformers import PreTrainedTokenizerFast

from kvdrift.generator.documents.prompts import PromptText, control_tokens, controls_in, plain_tokens, prompt_controls
from kvdrift.generator.documents.registry import stratum_documents
from kvdrift.generator.llama_cpp.gguf import GgufTokenizer, load_gguf_tokenizer
from kvdrift.schema.study import DocumentsSection

TURN = "<start_of_turn>user\nWhat can I ask you?<end_of_turn>\n<start_of_turn>model\n"
HEADER = (
    "<|start_header_id|>user<|end_header_id|>\n\nWrite code.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
REPORTED = {
    "case 03 and ggml-org/llama.cpp 7332": ("gemma", "<bos> keth jay", 1),
    "abetlen/llama-cpp-python 1561": ("gemma", f"<bos>{TURN}", 1),
    "LiveCodeBench/LiveCodeBench 146": ("llama-3", f"<|begin_of_text|>{HEADER}", 1),
    "abetlen/llama-cpp-python 1439, by hand": ("gemma", "<bos><bos>Hello", 1),
    "EleutherAI/lm-evaluation-harness 3295, added": ("gemma", "Hello", 1),
    "in the middle": ("gemma", "Hello <bos>Hello", 2),
    "vllm-project/vllm 7491, an EOS behind": ("mistral", "[INST]What is the capital of Taiwan[/INST]", 1),
}


def bos_first(name: str) -> str:
    """What the family's tokenizer adds to a text: BOS before it and, of Mistral's, EOS behind it."""
    return {"gemma": "<bos> $A", "llama-3": "<|begin_of_text|> $A", "mistral": "<s> $A </s>"}[name]


def gguf_of(tokenizer: PreTrainedTokenizerFast, file: Path, *adds: str) -> GgufTokenizer:
    """The tokenizer of a GGUF file that is written from another tokenizer."""
    found = load_gguf_tokenizer(write_random_llama(file, head_size=32, layers=1, tokenizer=tokenizer, adds=adds))
    assert found is not None
    return found


def check_begins_once(tokenizer: Any, text: str, count: int, bos: int, eos: int) -> list[int]:
    """Check that a prompt begins with one BOS, has ``count`` in all, and does not end with an EOS."""
    tokens = list(PromptText(text).tokens(tokenizer))
    assert tokens[0] == bos != tokens[1]
    assert tokens.count(bos) == count
    assert tokens[-1] != eos
    return tokens


@pytest.mark.parametrize("reported", REPORTED)
def test_a_prompt_begins_with_one_bos(reported: str) -> None:
    family, text, count = REPORTED[reported]
    tokenizer = family_tokenizer(family, bos_first(family))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer(text)["input_ids"][0] == bos
    check_begins_once(tokenizer, text, count, bos, eos)


@pytest.mark.llama_cpp
@pytest.mark.parametrize("family", ["gemma", "llama-3", "mistral"])
def test_a_prompt_of_a_gguf_begins_with_one_bos(tmp_path: Path, family: str) -> None:
    tokenizer = family_tokenizer(family, bos_first(family))
    own = gguf_of(tokenizer, tmp_path / "model.gguf", *(["bos", "eos"] if family == "mistral" else ["bos"]))
    for of, text, count in REPORTED.values():
        if of == family:
            bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
            assert check_begins_once(own, text, count, bos, eos) == list(PromptText(text).tokens(tokenizer))


@pytest.mark.parametrize("family", ["gemma", "llama-3", "mistral"])
def test_the_templates_bos_is_the_only_one(family: str) -> None:
    """vllm-project/vllm 16853 and evalplus/evalplus 207: the template writes BOS, and the tokenizer adds one."""
    tokenizer = family_tokenizer(family, bos_first(family))
    for question in ("Are you ok?", f"{tokenizer.bos_token}Are you ok?"):
        tokens = PromptText(question).tokens(tokenizer, chat=True)
        assert tokens[0] == tokenizer.bos_token_id
        assert tokens.count(tokenizer.bos_token_id) == 1


def test_a_template_that_writes_bos_twice_begins_once() -> None:
    tokenizer = family_tokenizer("llama-3")
    once = PromptText("Hi").tokens(tokenizer, chat=True)
    tokenizer.chat_template = "<|begin_of_text|>" + tokenizer.chat_template
    assert PromptText("Hi").tokens(tokenizer, chat=True) == once


def test_a_bos_that_also_begins_turns_stays_and_is_not_added() -> None:
    """SmolLM2's BOS is the token that begins a turn, and its tokenizer adds none."""
    tokenizer = family_tokenizer("chatml")
    start = tokenizer.bos_token_id
    written = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert list(PromptText(written).tokens(tokenizer)) == tokenizer(written)["input_ids"]
    assert PromptText(written).tokens(tokenizer).count(start) == 2
    assert PromptText("Hi").tokens(tokenizer, chat=True)[0] == start
    assert PromptText("Hi").tokens(tokenizer)[0] != start


def test_a_tokenizer_without_bos_adds_none() -> None:
    """Qwen's: a text that begins with a control token keeps it."""
    tokenizer = chat_tokenizer(("<|endoftext|>", "<|im_end|>"), None, "<|im_end|>")
    for text in ("Hello", "<|endoftext|><|endoftext|>Hello"):
        assert list(PromptText(text).tokens(tokenizer)) == tokenizer(text)["input_ids"]


def test_a_beginning_of_two_tokens_is_one_beginning() -> None:
    """GLM's tokenizers put two control tokens before a text."""
    tokenizer = chat_tokenizer(("[gMASK]", "<sop>", "<eos>"), None, "<eos>", "[gMASK] <sop> $A")
    expected = tokenizer("Hello")["input_ids"]
    assert list(PromptText("[gMASK]<sop>Hello").tokens(tokenizer)) == expected
    assert list(PromptText("Hello").tokens(tokenizer)) == expected


@pytest.mark.llama_cpp
def test_a_token_of_text_that_llama_cpp_takes_for_bos_is_text(tmp_path: Path) -> None:
    """ggml-org/llama.cpp 7898: of a file that names no BOS, llama.cpp says that token 11 is."""
    own = gguf_of(chat_tokenizer(("<|im_end|>",), None, "<|im_end|>"), tmp_path / "model.gguf")
    assert own.bos_token_id is None
    comma = own.decode([11])
    assert plain_tokens(own, comma * 3) == own(comma * 3, add_special_tokens=False)["input_ids"]


@pytest.mark.llama_cpp
def test_control_tokens_of_a_file_are_those_of_the_original(tmp_path: Path) -> None:
    original = chat_tokenizer(
        ("<s>", "<|im_end|>", "[INST]"), "<s>", "<|im_end|>", template="{{ messages[0].content }}<turn>",
        unmarked=("<turn>", "<other>"),
    )  # fmt: skip
    own = gguf_of(original, tmp_path / "model.gguf")
    assert control_tokens(own) == control_tokens(original)
    assert set(control_tokens(own)) == {"<s>", "<|im_end|>", "[INST]", "<turn>"}  # the template writes <turn>


def test_control_tokens_are_found_as_the_tokenizer_finds_them() -> None:
    tokenizer = chat_tokenizer(("<a>", "<a><b>", "[/]"), None, "<a>")
    text = "x<a><b>y<a>z[/]<a"
    assert controls_in(tokenizer, [text, "<a>"]) == ("<a><b>", "<a>", "[/]", "<a>")
    found = [token for token in tokenizer(text)["input_ids"] if token in control_tokens(tokenizer).values()]
    assert tokenizer.convert_ids_to_tokens(found) == ["<a><b>", "<a>", "[/]"]
    assert controls_in(chat_tokenizer((), None, "."), [text]) == ()


def test_a_bos_that_only_the_text_can_write_is_not_named() -> None:
    for adds, named in (("$A", ()), ("<bos> $A", ("<bos>",))):
        tokenizer = family_tokenizer("gemma", adds)
        assert prompt_controls(tokenizer, "<bos>Hello") == named
        assert prompt_controls(tokenizer, "<bos><eos>Hello <bos>") == (*named, "<eos>", "<bos>")
        assert prompt_controls(tokenizer, "Hello <bos>") == ("<bos>",)
    assert prompt_controls(family_tokenizer("gemma"), "<eos>Hello") == ("<eos>",)


def test_documents_of_case_03_begin_once_and_name_the_tokens_in_their_text(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("gemma", "<bos> $A")
    rows = [{"id": f"d{n}", "prompt": f"<bos> keth jay {n}<end_of_turn>"} for n in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {
        "source": "jsonl", "path": str(tmp_path / "p.jsonl"), "length": 60, "development": 2, "evaluation": 3
    }  # fmt: skip
    for chat in (False, True):
        section = DocumentsSection(**keys, chat_template=chat)
        for document in chain(*stratum_documents(section, 0, lambda: tokenizer).values()):
            assert document.tokens[:2].count(tokenizer.bos_token_id) == 1
            assert document.control_tokens == ("<bos>", "<end_of_turn>")
            assert document.templated == chat
            assert document.tokens.count(tokenizer.convert_tokens_to_ids("<end_of_turn>")) == 1
