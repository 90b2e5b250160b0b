"""The embedded model as GGUF files, which llama.cpp reads: in float32, and with matrices in 8 and 4 bits.

    python -m training.gguf_files --output generator/embedded/gguf

GGUF has no form for the embedded model's word-level tokenizer. The files are written without a vocabulary, and prompts
are given to an engine as token ids. This command made the committed files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDER

QUANTIZATIONS = ("F32", "Q8_0", "Q4_0")


def write_gguf(folder: Path, file: Path, quantization: str, symbols: Sequence[str] | None = None) -> None:
    """Write a Qwen2 model, from a folder that transformers wrote, as one GGUF file, by default without a vocabulary.

    The quantization, one of ``QUANTIZATIONS``, applies to matrices; vectors stay in float32. With ``symbols``, the text
    of each token, the file has a vocabulary, which a server needs to write tokens; prompts are still token ids.
    """
    network = AutoModelForCausalLM.from_pretrained(folder)
    config = network.config
    kind = GGMLQuantizationType[quantization]
    writer = GGUFWriter(file, "qwen2")
    writer.add_name("kvdrift-tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if symbols is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(symbols))
        writer.add_token_scores([0.0] * len(symbols))
        writer.add_token_types([TokenType.CONTROL if text.startswith("<") else TokenType.NORMAL for text in symbols])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values: NDArray[np.float32] = tensor.float().numpy()
        used = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the embedded model in every quantization, and print the files."""
    parser = argparse.ArgumentParser(description="Write the embedded model as GGUF files.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for quantization in QUANTIZATIONS:
        file = output / f"tiny-{quantization}.gguf"
        write_gguf(EMBEDDED_FOLDER, file, quantization)
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
