"""The compiled library of llama.cpp: the C structures that are passed by value, and the functions.

The library is that of the package xllamacpp, which exports the C interface. Structures change between builds without
notice. A library is therefore used only if its name and version are known, and if its default parameters are those
recorded here.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections import deque
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from kvdrift.schema.errors import InputError, installing

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


PACKAGE: Final = "xllamacpp"
VERSION: Final = "2026.10.11549"
"""The version of the package for which the structures in this module are declared."""
INSTALL: Final = installing("llama-cpp")

_INFO, _WARNING, _ERROR = 2, 3, 4  # levels of the library's log; 1 is debugging output, and 5 continues a line
_LINES = 200  # of the log that are kept: a context's report, and the last errors

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)

_DEFAULTS: Final[dict[type[Structure], tuple[str, dict[str, Any]]]] = {
    ModelParameters: ("llama_model_default_params", MODEL_DEFAULTS),
    ContextParameters: ("llama_context_default_params", CONTEXT_DEFAULTS),
}

_FUNCTIONS: Final[dict[str, tuple[Any, list[Any]]]] = {
    **{name: (kind, []) for kind, (name, _) in _DEFAULTS.items()},
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    "llama_version": (c_char_p, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParameters]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_model_n_swa": (c_int32, [c_void_p]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "llama_model_chat_template": (c_char_p, [c_void_p, c_char_p]),
    "llama_vocab_type": (c_int32, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_is_control": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_get_attr": (c_int32, [c_void_p, c_int32]),
    "llama_vocab_eos": (c_int32, [c_void_p]),
    "llama_vocab_bos": (c_int32, [c_void_p]),
    "llama_vocab_get_text": (c_char_p, [c_void_p, c_int32]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_detokenize": (c_int32, [c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParameters]),
    "llama_free": (None, [c_void_p]),
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_n_threads": (c_int32, [c_void_p]),
    "llama_n_threads_batch": (c_int32, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits_ith": (c_void_p, [c_void_p, c_int32]),
    "llama_state_seq_get_size": (c_size_t, [c_void_p, c_int32]),
}


@dataclass(frozen=True)
class Library:
    """The functions of a library whose structures are known."""

    file: Path  # the compiled library
    version: str  # the version of the package that brought the library
    system: str  # the processor features that the library was built with, in the library's words
    calls: Any  # the C library; its functions are declared as in ``_FUNCTIONS``
    log_lines: deque[tuple[int, str]]  # the last lines of its log, each with its level
    callback: Any  # the function that the library calls with each line; it must live as long as the library

    def parameters(self, kind: type[Structure], **values: Any) -> Any:
        """Return the library's default parameters, a ``ModelParameters`` or ``ContextParameters``, with ``values``.

        Raises:
            InputError: The defaults are not those recorded here: the library has other structures.
        """
        function, defaults = _DEFAULTS[kind]
        parameters = getattr(self.calls, function)()
        for name, value in defaults.items():
            if (found := getattr(parameters, name)) != value:
                raise InputError(
                    f"{PACKAGE}: {function} has {name} = {found}, where {value} is known: this build has other "
                    f"structures: {INSTALL}"
                )
        for name, value in values.items():
            setattr(parameters, name, value)
        return parameters

    def listen(self) -> None:
        """Empty ``log_lines`` and let the library log there, even if a server in this process redirected the log."""
        self.log_lines.clear()
        self.calls.llama_log_set(ctypes.cast(self.callback, c_void_p), None)

    def last_words(self) -> str:
        """Return the last errors and warnings of the log, for an error line."""
        serious = [text for level, text in self.log_lines if level >= _WARNING]
        return "; ".join(serious[-3:]) or "the library reports no reason"

    def log_text(self) -> str:
        """Return the lines of the log since it was last cleared."""
        return "\n".join(text for _, text in self.log_lines)


@functools.cache
def library() -> Library:
    """Load the library, once in a process.

    Raises:
        InputError: The package is not installed, or its structures are not known.
    """
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise InputError(f'engine = "llama.cpp": needs the package {PACKAGE}: {INSTALL}') from None
    if package.version != VERSION:
        raise InputError(
            f"{PACKAGE} {package.version}: its structures are not known, only those of {VERSION}: {INSTALL}"
        )
    file = next(Path(str(package.locate_file(PACKAGE))).glob(f"{PACKAGE}*.so"))
    calls = ctypes.CDLL(str(file))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
    lines: deque[tuple[int, str]] = deque(maxlen=_LINES)

    def note(level: int, text: bytes, _: Any) -> None:
        if _INFO <= level <= _ERROR and (line := text.decode(errors="replace").strip()):
            lines.append((level, line))

    callback = _LOG(note)
    calls.llama_log_set(ctypes.cast(callback, c_void_p), None)
    atexit.register(calls.llama_log_set, None, None)  # the library cannot call Python once that has ended
    calls.llama_backend_init()
    system = " ".join(calls.llama_print_system_info().decode().split())
    return Library(file, package.version, system, calls, lines, callback)
