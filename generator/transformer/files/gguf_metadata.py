"""The metadata of a GGUF file, and what a configuration needs of it that transformers does not read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError

_METADATA_OF_ENDS = ("eos", "eot", "eom")  # tokenizer.ggml.EOS_token_id and so on
_NAMES_OF_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|end_of_sentence|>", "<EOT>", "_<EOT>", "< EOT >", "<|EOT|>",
})  # fmt: skip
"""Names of tokens that end a text, by which llama.cpp finds tokens that the metadata does not name."""
_CONTROL = 3  # of the kinds of tokens in ``tokenizer.ggml.token_type``

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Names of architectures in the metadata that are read; tests hold each."""
_KNOWN = frozenset({
    "context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "attn_logit_softcapping", "final_logit_softcapping",
})  # fmt: skip
"""Keys of an architecture that transformers or ``complete`` reads. Another key may change what the model computes."""
_LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_LLAMA_3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_CLOSE = 1e-3  # of Llama 3's factors, which converters compute in float32


class GgufMetadata:
    """The metadata of a GGUF file."""

    def __init__(self, file: Path) -> None:
        import gguf  # noqa: PLC0415 - an extra

        reader = gguf.GGUFReader(file)
        self._fields = reader.fields
        self._rope = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}

    def value(self, key: str) -> Any:
        """Return a value of the metadata; None if the file has no such value."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    @property
    def pre(self) -> str | None:
        """The name of the rule by which texts are split; None for tokenizers without one."""
        return self.value("tokenizer.ggml.pre") if self.value("tokenizer.ggml.model") == "gpt2" else None

    def ends(self) -> Iterator[int]:
        """Yield the tokens that end a text: those that the metadata names, then those known by their names."""
        for name in _METADATA_OF_ENDS:
            token = self.value(f"tokenizer.ggml.{name}_token_id")
            if token is not None:
                yield int(token)
        names, kinds = (self.value(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
        for token, (name, kind) in enumerate(zip(names, kinds, strict=False)):
            if name in _NAMES_OF_ENDS and kind == _CONTROL:
                yield token

    @property
    def architecture(self) -> str:
        """The name of the architecture."""
        return str(self.value("general.architecture"))

    def stated(self, key: str) -> Any:
        """Return a value that the metadata has for the architecture; None if the file has no such value."""
        return self.value(f"{self.architecture}.{key}")

    def check_known(self, where: str) -> None:
        """Check that transformers or ``complete`` reads all that the model computes.

        Raises:
            InputError: The model computes something else; the line begins with ``where``.
        """
        name = self.architecture
        other = 'take a folder of transformers, or engine = "llama.cpp"'
        if name not in ARCHITECTURES:
            raise InputError(f"{where}: architecture '{name}' is read from a GGUF file by llama.cpp only; {other}")
        keys = (key.removeprefix(f"{name}.") for key in self._fields if key.startswith(f"{name}."))
        unread = sorted(key for key in keys if key not in _KNOWN and self.stated(key) not in (0, "", None))
        unread += [tensor for tensor in _ROPE_TENSORS if tensor in self._rope]
        if unread:
            raise InputError(f"{where}: the model has {name}.{unread[0]}, which is read by llama.cpp only; {other}")
        kind = self.stated("rope.scaling.type")
        if kind not in (None, "none", "linear"):
            raise InputError(f"{where}: RoPE scaled by '{kind}' is read by llama.cpp only; {other}")

    @property
    def rope_factors(self) -> NDArray[np.float32] | None:
        """The factors by which Llama 3 divides RoPE's frequencies, [channels / 2]; None if the file has none."""
        return self._rope.get("rope_freqs.weight")


def complete(config: Any, metadata: GgufMetadata) -> None:
    """Set what transformers leaves at the default of the class: head size, soft caps, scales and RoPE's factors.

    Raises:
        ValueError: RoPE's factors are not Llama 3's.
    """
    size = metadata.stated("attention.key_length")
    if size is not None and hasattr(config, "head_dim"):
        config.head_dim = int(size)
    if metadata.architecture.startswith("gemma"):
        large = config.num_hidden_layers == _LAYERS_OF_GEMMA_27B[metadata.architecture]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else config.head_dim
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            setattr(config, name, metadata.stated(name))
    if metadata.architecture == "phi3":
        config.sliding_window = None  # llama.cpp has no window for this architecture, whatever the file states
        rotated = int(metadata.stated("rope.dimension_count") or 0)
        if rotated:
            config.partial_rotary_factor = rotated / (config.hidden_size // config.num_attention_heads)
            config.rope_parameters["partial_rotary_factor"] = config.partial_rotary_factor
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)  # Gemma 3's windows have their own
    if metadata.stated("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": float(metadata.stated("rope.scaling.factor"))}
    if metadata.rope_factors is not None:
        rope |= _llama_3(metadata.rope_factors, float(rope["rope_theta"]))


def _llama_3(factors: NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE, if they give these factors."""
    most = float(factors.max())
    low, high, original = _LLAMA_3.values()
    turns = original * theta ** (-np.arange(len(factors)) / len(factors)) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / most + smooth)
    if not np.allclose(factors, expected, rtol=_CLOSE):
        raise ValueError("rope_freqs.weight has other factors than Llama 3's")
    return {"rope_type": "llama3", "factor": round(most, 3), **_LLAMA_3}
