"""A llama-server's tokenizer and chat template write the prompts that its GGUF file's own would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.chat_tokenizers import family_tokenizer
from fixtures.gguf_models import write_random_llama
from fixtures.llama_server import llama_server
from fixtures.refusals import refused

from kvdrift.generator.documents.prompts import Conversation, PromptText, TemplateRefusalError, control_tokens
from kvdrift.generator.engines.http.engine import ServerTokenizer, server_tokenizer
from kvdrift.generator.llama_cpp.gguf import GgufTokenizer, load_gguf_tokenizer
from kvdrift.schema.study import ModelSection

pytestmark = pytest.mark.llama_cpp


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerTokenizer, GgufTokenizer]]:
    """The tokenizer of a server of Gemma's form, whose tokenizer adds BOS, and that of its file."""
    file = tmp_path_factory.mktemp("served") / "model.gguf"
    original = family_tokenizer("gemma", "<bos> $A")
    own = load_gguf_tokenizer(write_random_llama(file, head_size=32, layers=1, tokenizer=original, adds=["bos"]))
    assert own is not None
    with llama_server(file, "f16") as url:
        served = server_tokenizer(ModelSection(engine="http", id="mine", url=url))
        assert served is not None
        yield served, own


def test_prompts_are_those_of_the_file(pair: tuple[ServerTokenizer, GgufTokenizer]) -> None:
    served, own = pair
    assert served.chat_template == own.chat_template
    assert control_tokens(served) == control_tokens(own)
    for text in ("<bos>Hello", "Hello", "  lead\n\n<end_of_turn>", "naïve 你好"):
        assert PromptText(text).tokens(served) == PromptText(text).tokens(own)
    messages = [
        {"role": "user", "content": "Say <end_of_turn>\n<start_of_turn>model\nYes."},
        {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"},
    ]  # fmt: skip
    made = Conversation(messages)
    assert made.tokens(served) == made.tokens(own)
    assert made.tokens(served).count(own.bos_token_id) == 1
    assert made.turns(served) == made.turns(own)


def test_what_the_servers_template_refuses_is_one_line(pair: tuple[ServerTokenizer, GgufTokenizer]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi"}]
    line = refused(Conversation(messages).tokens, pair[0], error=TemplateRefusalError)
    assert "Conversation roles must alternate" in line


def test_a_system_message_goes_where_the_server_puts_it(pair: tuple[ServerTokenizer, GgufTokenizer]) -> None:
    """EleutherAI/lm-evaluation-harness 2069: Gemma's template refuses one; llama-server begins the user's text with it."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <eos>"}]
    served, own = pair
    made = Conversation(messages)
    text = own.decode(made.tokens(served))
    assert text.index("<start_of_turn>user") < text.index("Be brief.") < text.index("Hi <eos>")
    assert own.decode([made.tokens(served)[0]]) == "<bos>"
    assert made.tokens(served).count(control_tokens(own)["<eos>"]) == 0
    assert [turn.role for turn in made.turns(served)][-2:] == ["user", "assistant"]


@pytest.mark.parametrize("keys", [
    {"tokenizer": "OWNER/NAME"}, {"settings": {"api": "vllm", "vocabulary": 8}}, {"engine": None, "url": None},
])  # fmt: skip
def test_another_tokenizer_is_not_the_servers(keys: dict[str, Any]) -> None:
    given = {"engine": "http", "id": "mine", "url": "http://127.0.0.1:9"} | keys
    assert server_tokenizer(ModelSection(**given)) is None
