"""Conversations through chat templates: the tokens of transformers, texts that stay texts, and turns.

Inputs reported of other programs are named by repository and number.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fixtures.chat_tokenizers import CHATML, FAMILIES, chat_tokenizer, family_tokenizer
from fixtures.gguf_models import write_random_llama
from fixtures.refusals import refused
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvdrift.generator.documents.prompts import (
    Conversation,
    PromptText,
    TemplateRefusalError,
    TokenizerWithVariables,
    control_tokens,
)
from kvdrift.generator.llama_cpp.gguf import load_gguf_tokenizer
from kvdrift.schema.document import Document

PIECES = (
    "The special magic number", " is", " 4711", ".", "\n", "\n\n", "  ", "{{ x }}", "é", "你好", "<b>", "kvdrift0q", "[", "]",
    "user", "assistant", "<|", "|>",
)  # fmt: skip
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, PreTrainedTokenizerFast]:
    return request.param, family_tokenizer(request.param)


def draws(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - no secret


def drawn_text(draw: random.Random, pieces: tuple[str, ...] = PIECES) -> str:
    return "".join(draw.choices(pieces, k=draw.randint(1, 9))).strip() or "x"


def drawn_messages(draw: random.Random, name: str, pieces: tuple[str, ...] = PIECES) -> list[dict[str, Any]]:
    """A conversation that a family's template takes: Gemma's has no system role, and Mistral's takes tools."""
    messages = []
    if name != "gemma" and draw.random() < 0.5:
        messages.append({"role": "system", "content": drawn_text(draw, pieces)})
    for _ in range(draw.randint(0, 3)):
        messages += [{"role": role, "content": drawn_text(draw, pieces)} for role in ("user", "assistant")]
    messages.append({"role": "user", "content": drawn_text(draw, pieces)})
    if name == "mistral" and draw.random() < 0.5:
        messages += [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": drawn_text(draw, pieces)}]
    return messages


def of_transformers(tokenizer: PreTrainedTokenizerFast, made: Conversation, **options: Any) -> list[int]:
    tokens: list[int] = tokenizer.apply_chat_template(
        made.messages, tools=made.tools, add_generation_prompt=True, return_dict=False, **options
    )
    return tokens


def tokens_of_turns(tokenizer: Any, made: Conversation) -> list[tuple[str, str]]:
    """The role and text of each turn; together they are the prompt."""
    tokens = list(made.tokens(tokenizer))
    turns = made.turns(tokenizer)
    firsts = [turn.first for turn in turns]
    assert firsts == sorted(set(firsts))
    assert firsts[0] == 1
    ends = [*firsts[1:], len(tokens) + 1]
    return [
        (turn.role, tokenizer.decode(tokens[turn.first - 1 : end - 1])) for turn, end in zip(turns, ends, strict=True)
    ]


def test_tokens_are_those_of_transformers(family: tuple[str, PreTrainedTokenizerFast]) -> None:
    name, tokenizer = family
    draw = draws(1)
    for _ in range(25):
        made = Conversation(drawn_messages(draw, name), TOOLS if name == "mistral" else None)
        assert list(made.tokens(tokenizer)) == of_transformers(tokenizer, made)


def test_control_tokens_in_messages_are_text(family: tuple[str, PreTrainedTokenizerFast]) -> None:
    """vllm-project/vllm 31735 and huggingface/transformers 29279: a message must not end its turn.

    The template's own control tokens are as many as with other texts, and the text is the one that the template writes.
    """
    name, tokenizer = family
    controls = FAMILIES[name][1]
    draw = draws(2)
    for _ in range(25):
        made = Conversation(drawn_messages(draw, name, PIECES + 2 * controls), TOOLS if name == "mistral" else None)
        tokens = list(made.tokens(tokenizer))
        harmless = Conversation(
            [m | {"content": "x"} if "content" in m else m for m in made.messages], made.tools
        ).tokens(tokenizer)
        own = set(control_tokens(tokenizer).values())
        assert [token for token in tokens if token in own] == [token for token in harmless if token in own]
        assert tokenizer.decode(tokens) == tokenizer.decode(of_transformers(tokenizer, made))
        assert tokens == of_transformers(tokenizer, made, sanitize_control_tokens=True)


def test_turns_begin_with_their_headers(family: tuple[str, PreTrainedTokenizerFast]) -> None:
    name, tokenizer = family
    draw = draws(3)
    pieces = PIECES + FAMILIES[name][1]
    for _ in range(25):
        made = Conversation(drawn_messages(draw, name, pieces), TOOLS if name == "mistral" else None)
        turns = tokens_of_turns(tokenizer, made)
        roles = [message["role"] for message in made.messages]
        if name == "chatml" and roles[0] != "system":
            assert turns[0] == ("system", "<|im_start|>system\nYou are helpful.<|im_end|>\n")
            turns = turns[1:]
        if name != "mistral":  # whose answer has no header
            role, header = turns.pop()
            assert role == "assistant"
            assert "assistant" in header or "model" in header
        assert [role for role, _ in turns] == roles
        begins = {"chatml": "<|im_start|>", "llama-3": "<|start_header_id|>", "gemma": "<start_of_turn>", "mistral": ""}
        for (_, text), message in zip(turns, made.messages, strict=True):
            assert text.removeprefix(tokenizer.bos_token if name != "chatml" else "").startswith(begins[name])
            assert message.get("content", '"add"') in text


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["chatml", "llama-3"])
def test_a_gguf_writes_the_same_conversations(tmp_path: Path, name: str) -> None:
    original = family_tokenizer(name)
    adds = ["bos"] if name == "llama-3" else []
    own = load_gguf_tokenizer(write_random_llama(tmp_path / "m.gguf", head_size=32, tokenizer=original, adds=adds))
    assert own is not None
    draw = draws(4)
    for _ in range(20):
        made = Conversation(drawn_messages(draw, name, PIECES + FAMILIES[name][1]))
        assert made.tokens(own) == made.tokens(original)
        assert made.turns(own) == made.turns(original)


@pytest.mark.llama_cpp
def test_a_gguf_writes_tools_by_its_template_for_tools(tmp_path: Path) -> None:
    original = family_tokenizer("mistral")
    original.chat_template = {"default": "{{ messages[0].content }}", "tool_use": original.chat_template}
    own = load_gguf_tokenizer(write_random_llama(tmp_path / "m.gguf", head_size=32, tokenizer=original))
    for tools in (None, TOOLS):
        made = Conversation([{"role": "user", "content": "Hi"}], tools)
        assert made.tokens(own) == made.tokens(original)


def test_an_added_token_that_ends_turns_is_text_in_messages() -> None:
    """A comment on huggingface/transformers 47386: not every token of a template is marked as special."""
    tokenizer = chat_tokenizer(("<eos>",), None, "<eos>", template=CHATML, unmarked=("<|im_start|>", "<|im_end|>"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    made = Conversation([{"role": "user", "content": "a<|im_end|>b"}])
    assert made.tokens(tokenizer).count(end) == 2  # the system's and the user's
    assert "a<|im_end|>b" in tokenizer.decode(made.tokens(tokenizer))


def test_roles_reach_the_template_as_they_are() -> None:
    """Also if a role's name is an added token, which the template writes."""
    tokenizer = chat_tokenizer(
        ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", template=CHATML, unmarked=("system", "assistant")
    )
    made = Conversation([{"role": "system", "content": "a"}, {"role": "user", "content": "the system"}])
    assert tokenizer.decode(made.tokens(tokenizer)) == tokenizer.decode(of_transformers(tokenizer, made))
    assert [turn.role for turn in made.turns(tokenizer)] == ["system", "user", "assistant"]


@pytest.mark.parametrize("template", [
    "{% if messages[0].content.startswith('kvdrift') %}{{ raise_exception('no') }}{% endif %}" + CHATML,
    CHATML.replace("m.content", "m.content[:3]"),
])  # fmt: skip
def test_a_template_that_looks_at_contents_has_no_turns(template: str) -> None:
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = template
    made = Conversation([{"role": "user", "content": "How many?"}])
    assert list(made.tokens(tokenizer)) == of_transformers(tokenizer, made)
    assert made.turns(tokenizer) == ()


def test_no_space_comes_before_a_part_of_a_text() -> None:
    """Of a tokenizer that puts a space before texts, as SentencePiece does."""
    unknown = "<unk>"
    trained = Tokenizer(BPE(unk_token=unknown))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = [CHATML, "abc <|im_end|> <|im_start|>"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=[unknown, "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, unk_token=unknown, chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made = Conversation([{"role": "system", "content": "s"}, {"role": "user", "content": "a<|im_end|>b <|im_end|> c"}])
    written = tokenizer.decode(of_transformers(tokenizer, made))
    assert tokenizer.decode(made.tokens(tokenizer)) == written


def test_tool_calls_without_content_are_written() -> None:
    """huggingface/text-generation-inference 3198: a system's message, and a call whose content is null."""
    tokenizer = family_tokenizer("mistral")
    call = {"id": "0", "type": "function", "function": {"name": "get-profile", "arguments": '{"actor_id":"22"}'}}
    messages = [
        {"role": "system", "content": "You are a personal assistant."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Not Found", "tool_call_id": "0"},
    ]  # fmt: skip
    turns = tokens_of_turns(tokenizer, Conversation(messages))
    assert [role for role, _ in turns] == ["system", "user", "assistant", "tool"]
    assert turns[2][1].startswith("[TOOL_CALLS]")
    assert '"get-profile"' in turns[2][1]
    assert turns[3][1] == "[TOOL_RESULTS]Not Found[/TOOL_RESULTS]"


def test_a_template_that_refuses_messages_is_one_line() -> None:
    """EleutherAI/lm-evaluation-harness 2069: Gemma's template has no system role."""
    tokenizer = family_tokenizer("gemma")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    line = refused(Conversation(messages).tokens, tokenizer, error=TemplateRefusalError)
    assert line.endswith("System role not supported")
    tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    line = refused(Conversation(messages).tokens, tokenizer, error=TemplateRefusalError)
    assert "cannot write the messages: TypeError" in line


def test_variables_reach_the_template() -> None:
    """EleutherAI/lm-evaluation-harness 3088: Qwen 3 thinks unless ``enable_thinking`` is false."""
    tokenizer = family_tokenizer("chatml")
    made = Conversation([{"role": "user", "content": "Hi"}])
    off = TokenizerWithVariables(tokenizer, {"enable_thinking": False})
    assert list(made.tokens(off)) == of_transformers(tokenizer, made, enable_thinking=False)
    assert tokenizer.decode(made.tokens(off)).endswith("<think>\n\n</think>\n\n")
    on = TokenizerWithVariables(tokenizer, {"enable_thinking": True})
    assert made.tokens(on) == made.tokens(tokenizer) != made.tokens(off)
    assert "does not read 'enable_thinkin'" in refused(TokenizerWithVariables, tokenizer, {"enable_thinkin": False})


def test_the_answers_opening_is_text_too() -> None:
    tokenizer = family_tokenizer("chatml")
    prompt = PromptText("Which?", chat_opening="The number<|im_end|> is")
    tokens = prompt.tokens(tokenizer, chat=True)
    assert tokenizer.decode(tokens).endswith("<|im_start|>assistant\nThe number<|im_end|> is")
    assert tokens[-1] != tokenizer.eos_token_id
    assert tokens.count(tokenizer.eos_token_id) == 2
    empty = Document("d", "s", "c", "t", "ruler", tokens)
    described = prompt.described(empty, tokenizer, chat=True)
    assert described.control_tokens == ("<|im_end|>",)
    assert [turn.role for turn in described.turns] == ["system", "user", "assistant"]
