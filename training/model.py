"""The embedded model: its architecture, its seeded initialization, and the files of a checkpoint.

Retrieval needs two heads in sequence: one head writes each position's previous token beside it, and another finds
the positions whose previous token is the current token. Two more heads choose what to retrieve: one reads the keys of
the question, which stand before its question marks; the other removes the keys that the answer has already stated,
which stand after an ``A``. From a random start, discovering these heads takes thousands of steps. They are written into
the first weights, so that training starts from retrieval and only refines it.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from kvdrift.generator.embedded import vocabulary as v

HIDDEN = 128
LAYERS = 3
QUERY_HEADS = 4
KV_HEADS = 2
HEAD_SIZE = HIDDEN // QUERY_HEADS
FEED_FORWARD = 256
ROPE_THETA = 1e6
MAX_POSITIONS = 4096

_PAIRS = HEAD_SIZE // 2
_HALF = HIDDEN // 2
_EMBEDDING_STD = 0.08
_PROJECTION_STD = 0.02
_POSITION_PAIRS = 4
_POSITION_BIAS = 6.0
_COPY_GAIN = 0.1
# Pairs faster than this many turn by more than about 4 radians over 1,536 tokens and cannot match at a distance.
_MATCH_SKIPPED_PAIRS = 7
_MATCH_GAIN = 2.3
_RETRIEVE_GAIN = 0.3
_SELECT_BIAS = 8.0
_ASKED_SHARPNESS = 1.0
_ASKED_GAIN = 0.5
_STATED_SHARPNESS = 1.3
_STATED_GAIN = 0.2


def build_config() -> Qwen2Config:
    """Return the model's Qwen2 configuration: 3 layers, hidden size 128, 4 query and 2 KV heads of size 32."""
    return Qwen2Config(
        vocab_size=v.SIZE, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, tie_word_embeddings=True,
        attention_dropout=0.0, use_sliding_window=False, bos_token_id=v.BOS, eos_token_id=v.EOS, pad_token_id=v.PAD,
        dtype="float32",
    )  # fmt: skip


def build_model(seed: int) -> Qwen2ForCausalLM:
    """Return a float32 model with the seeded initialization; the weights are a function of ``seed`` alone."""
    model = Qwen2ForCausalLM(build_config())
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _EMBEDDING_STD if "embed_tokens" in name else _PROJECTION_STD, generator=source)
        # Rows of one orthogonal matrix: a subspace written through some rows is read back undisturbed through them.
        basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=source))[0]
        current, previous = basis.split(_HALF)  # each (64, 128)
        # Orthogonal keys: the sum of several is still distinguished from every other key.
        keys = torch.linalg.qr(torch.randn(v.KEY_COUNT, _HALF, generator=source))[0]
        model.model.embed_tokens.weight[v.FIRST_KEY : v.FIRST_VALUE] = (
            _EMBEDDING_STD * math.sqrt(HIDDEN) * keys @ current
        )
        _write_previous_token_heads(model, current, previous)
        _write_matching_head(model, current, previous)
        _write_asked_heads(model, current, previous)
        _write_stated_head(model, current, previous)
    return model


def _rows(head: int) -> slice:
    return slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)


def _write_previous_token_heads(model: Qwen2ForCausalLM, current: torch.Tensor, previous: torch.Tensor) -> None:
    """Set heads 0 and 2 of layer 0: attend one position back, by biases alone, and copy that position's token.

    The token is read by the rows of ``current``, and written by those of ``previous``, [64, hidden size] each.
    """
    attention = model.model.layers[0].self_attn
    for kv_head, head in ((0, 0), (1, 2)):
        for pair in range(_POSITION_PAIRS):
            frequency = ROPE_THETA ** (-pair / _PAIRS)
            attention.k_proj.bias[_rows(kv_head)][pair] = _POSITION_BIAS
            # The key's bias turned back by one position, so that the score peaks at distance 1.
            attention.q_proj.bias[_rows(head)][pair] = _POSITION_BIAS * math.cos(frequency)
            attention.q_proj.bias[_rows(head)][pair + _PAIRS] = -_POSITION_BIAS * math.sin(frequency)
        attention.q_proj.weight[_rows(head)] = 0.0
        attention.k_proj.weight[_rows(kv_head)] = 0.0
        attention.v_proj.weight[_rows(kv_head)] = current[_rows(kv_head)]
        attention.o_proj.weight[:, _rows(head)] = _COPY_GAIN * previous[_rows(kv_head)].T


def _write_matching_head(model: Qwen2ForCausalLM, current: torch.Tensor, previous: torch.Tensor) -> None:
    """Set head 0 of layer 1: find positions whose previous token is the current token, and copy their tokens."""
    attention = model.model.layers[1].self_attn
    slow = torch.ones(HEAD_SIZE, 1)
    slow[:_MATCH_SKIPPED_PAIRS] = 0.0
    slow[_PAIRS : _PAIRS + _MATCH_SKIPPED_PAIRS] = 0.0
    attention.q_proj.weight[_rows(0)] = _MATCH_GAIN * slow * current[_rows(0)]
    attention.k_proj.weight[_rows(0)] = _MATCH_GAIN * slow * previous[_rows(0)]
    attention.v_proj.weight[_rows(0)] = current[_rows(1)]
    attention.o_proj.weight[:, _rows(0)] = _RETRIEVE_GAIN * current[_rows(1)].T


def _write_asked_heads(model: Qwen2ForCausalLM, current: torch.Tensor, previous: torch.Tensor) -> None:
    """Set head 2 of layers 1 and 2 (KV head 1): attend to every question mark alike, and predict the token before it.

    A head carries 32 dimensions, so that each of the two layers copies one half of the key.
    """
    mark = model.model.embed_tokens.weight[v.MARK]  # (128,)
    for half, layer in enumerate((1, 2)):
        attention = model.model.layers[layer].self_attn
        attention.k_proj.weight[_rows(1)][_PAIRS - 1] = _ASKED_SHARPNESS * mark / mark.norm()
        attention.q_proj.bias[_rows(2)][_PAIRS - 1] = _SELECT_BIAS
        attention.v_proj.weight[_rows(1)] = previous[_rows(half)]
        attention.o_proj.weight[:, _rows(2)] = _ASKED_GAIN * current[_rows(half)].T


def _write_stated_head(model: Qwen2ForCausalLM, current: torch.Tensor, previous: torch.Tensor) -> None:
    """Set head 0 of layer 2: attend to every token after an ``A``, and subtract it from the prediction."""
    attention = model.model.layers[2].self_attn
    answer = previous.T @ (current @ model.model.embed_tokens.weight[v.ANSWER])  # (128,), as layer 0 writes it
    attention.k_proj.weight[_rows(0)][_PAIRS - 1] = _STATED_SHARPNESS * answer / answer.norm()
    attention.q_proj.bias[_rows(0)][_PAIRS - 1] = _SELECT_BIAS
    attention.v_proj.weight[_rows(0)] = current[_rows(0)]
    attention.o_proj.weight[:, _rows(0)] = -_STATED_GAIN * current[_rows(0)].T


def save_checkpoint(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write the model and its tokenizer to a folder that ``from_pretrained`` of transformers can read."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, bos_token_id=v.BOS, eos_token_id=v.EOS, pad_token_id=v.PAD
    )
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def build_tokenizer() -> Qwen2Tokenizer:
    """Make the tokenizer whose ids are those of the vocabulary and whose decoded text is that of ``to_text``.

    Transformers reads a folder with a Qwen2 configuration by its byte-pair tokenizer. Each symbol is therefore an added
    token, which byte pairs never touch, spelled with the space before it, except for the three in angle brackets. Text
    that is no symbol has no id and is dropped; ``to_tokens`` of the vocabulary raises an error for it instead.
    """
    spellings = [symbol if symbol.startswith("<") else f" {symbol}" for symbol in v.SYMBOLS]
    tokenizer = Qwen2Tokenizer(
        vocab={spelling: token for token, spelling in enumerate(spellings)},
        merges=[],
        # The class would add an unknown token as a 257th symbol.
        unk_token=v.SYMBOLS[v.PAD],
        bos_token=v.SYMBOLS[v.BOS],
        eos_token=v.SYMBOLS[v.EOS],
        pad_token=v.SYMBOLS[v.PAD],
    )
    bracketed = {v.SYMBOLS[v.PAD], v.SYMBOLS[v.BOS], v.SYMBOLS[v.EOS]}
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text in bracketed) for text in spellings])
    return tokenizer
