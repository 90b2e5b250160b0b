"""The C structures of llama.cpp that are passed by value, and the bytes of their defaults.

Their layout changes between builds without notice. A library is therefore used only if its name and version are known,
and if the bytes of its default parameters are those recorded here. Every field that is set has a default by which its
place is recognized.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any, Final

MODEL_DEFAULTS: Final[dict[str, Any]] = {
    "devices": None, "tensor_buft_overrides": None, "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1,
    "lazy_mode": 1, "main_gpu": 0, "tensor_split": None, "progress_callback": None, "progress_callback_user_data": None,
    "kv_overrides": None, "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False,
    "no_alloc": False, "load_mtp": False,
}  # fmt: skip

CONTEXT_DEFAULTS: Final[dict[str, Any]] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1, "n_threads": 4, "n_threads_batch": 4, "ctx_type": 0, "rope_scaling_type": -1,
    "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0, "defrag_thold": -1.0, "cb_eval": None, "cb_eval_user_data": None, "type_k": 1, "type_v": 1,
    "pointer_1": None, "pointer_2": None, "pointer_3": None, "embeddings": False, "offload_kqv": True, "no_perf": True,
    "op_offload": True, "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip


class ModelParameters(Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32), ("split_mode", c_int32),
        ("load_mode", c_int32), ("lazy_mode", c_int32), ("main_gpu", c_int32), ("tensor_split", c_void_p),
        ("progress_callback", c_void_p), ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p),
        *((name, c_bool) for name, value in MODEL_DEFAULTS.items() if isinstance(value, bool)),
    )  # fmt: skip


class ContextParameters(Structure):
    """``llama_context_params``; three pointers after ``type_v`` are never set and have no name here."""

    _fields_ = (
        *((name, c_uint32) for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq"
        )),
        *((name, c_int32) for name in (
            "n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type", "pooling_type", "attention_type",
            "flash_attn_type",
        )),
        *((name, c_float) for name, value in CONTEXT_DEFAULTS.items() if name.startswith(("rope_freq", "yarn_"))
          and isinstance(value, float)),
        ("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float), ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32), ("type_v", c_int32), *((f"pointer_{number}", c_void_p) for number in (1, 2, 3)),
        *((name, c_bool) for name, value in CONTEXT_DEFAULTS.items() if isinstance(value, bool)),
        ("samplers", c_void_p), ("n_samplers", c_size_t), ("ctx_other", c_void_p),
    )  # fmt: skip


class Batch(Structure):
    """``llama_batch``: tokens with their positions and streams."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", c_void_p), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    )  # fmt: skip


_ROOM = 1024  # bytes for what a library returns: more than any build's structure takes
_FILLS = (0xAA, 0x55)


def written_defaults(function: Any) -> dict[int, int]:
    """Call a function that returns a structure in memory, and return the bytes that it wrote, by offset.

    The function has no arguments, such as ``llama_context_default_params``; its structure has at most 1024 bytes.
    """
    function.restype, function.argtypes = c_void_p, [c_void_p]  # a large structure is returned where the caller says
    written: list[bytes] = []
    for fill in _FILLS:
        room = (ctypes.c_ubyte * _ROOM)(*[fill] * _ROOM)
        function(ctypes.addressof(room))
        written.append(bytes(room))
    return {place: one for place, (one, other) in enumerate(zip(*written, strict=True)) if one == other}


def expected_defaults(kind: type[Structure], defaults: dict[str, Any]) -> dict[int, int]:
    """Return the bytes of a structure's known defaults, by offset; padding is left out."""
    image = bytes(kind(**{name: value for name, value in defaults.items() if value is not None}))
    places = [
        place
        for name in defaults
        for place in range(getattr(kind, name).offset, getattr(kind, name).offset + getattr(kind, name).size)
    ]
    return {place: image[place] for place in places}
