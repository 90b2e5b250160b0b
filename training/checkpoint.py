"""The files of a checkpoint: the weights, and a tokenizer whose decoded text is the symbols of the vocabulary."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2Tokenizer

from kvdrift.generator.embedded.vocabulary import BOS, EOS, PAD, SYMBOLS


def save_checkpoint(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write the model and its tokenizer to a folder that ``from_pretrained`` of transformers can read."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD
    )
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def build_tokenizer() -> Qwen2Tokenizer:
    """Make the tokenizer whose ids are those of the vocabulary and whose decoded text is that of ``to_text``.

    Transformers reads a folder with a Qwen2 configuration by its byte-pair tokenizer. Each symbol is therefore an added
    token, which byte pairs never touch, spelled with the space before it except for the three in brackets. Text that
    is no symbol has no id and is dropped; ``to_tokens`` of the vocabulary raises an error for it instead.
    """
    spellings = [symbol if symbol.startswith("<") else f" {symbol}" for symbol in SYMBOLS]
    tokenizer = Qwen2Tokenizer(
        vocab={spelling: token for token, spelling in enumerate(spellings)},
        merges=[],
        # The class would add an unknown token of its own as a 257th symbol.
        unk_token=SYMBOLS[PAD],
        bos_token=SYMBOLS[BOS],
        eos_token=SYMBOLS[EOS],
        pad_token=SYMBOLS[PAD],
    )
    bracketed = {SYMBOLS[PAD], SYMBOLS[BOS], SYMBOLS[EOS]}
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text in bracketed) for text in spellings])
    return tokenizer
