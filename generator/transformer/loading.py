"""Loading a causal language model, and what is checked of it before it is trusted."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from generator.actions import Action
from generator.attention.cpu_products import replace_activations, replace_linear_layers
from generator.attention.interface import IMPLEMENTATION
from generator.attention.row_invariance import RowInvariance, find_row_multiple
from generator.transformer.memory import ModelShape
from generator.transformer.prompt import PreparedPrompt
from schema.document import Document
from schema.errors import InputError, nearest

EMBEDDED_ID = "kvdrift/tiny"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded" / "checkpoint"
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Supported architectures, each with the ``model_type`` by which transformers chooses its code."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ATTENTION = {"sliding_attention": "sliding-window attention", "chunked_attention": "chunked attention"}

# Below this size handing a matrix product to a second thread takes longer than computing it, and on a busy machine
# many times longer.
ONE_THREAD_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for coupled decoding."""

    id: str
    network: Any  # a transformers causal language model in evaluation mode
    device: str  # where tokens go in and laws come out; with a device map, layers may lie elsewhere
    dtype: str
    eos_tokens: tuple[int, ...]
    positions: int  # the most tokens, prompt and generated ones, that the model was made for
    shape: ModelShape
    rows: RowInvariance

    @property
    def batch_deviation(self) -> float:
        """See ``generator.generation.Model``."""
        return self.rows.deviation

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedPrompt:
        """Prefill the document and evict for each action.

        InputError when a retention cannot hold window and sinks, and for a document too long for the model.
        """
        check_positions(document.doc, document.prompt_tokens, horizon, self.positions)
        return PreparedPrompt(self, document, actions, horizon)


def check_model(
    model_id: str, *, dtype: str, revision: str | None, device: str = "cpu", device_map: str | None = None
) -> None:
    """What can be known of a model without loading it; raises as ``load_model``."""
    if dtype not in DTYPES:
        raise InputError(f"model.dtype = '{dtype}': {nearest(dtype, DTYPES)}")
    if device_map is None:
        _check_device(device)
    elif importlib.util.find_spec("accelerate") is None:
        raise InputError(
            f"model.device_map = '{device_map}': needs the package accelerate: install kvdrift with [multi-gpu]"
        )
    with _quiet():
        _refuse_unsupported(_config(_source(model_id), model_id, revision), model_id)


def position_limit(model_id: str, *, revision: str | None = None) -> int:
    """The most tokens, prompt and generated ones, by the model's configuration; raises as ``check_model``."""
    with _quiet():
        return int(_config(_source(model_id, weights=False), model_id, revision).max_position_embeddings)


def check_positions(doc: str, prompt_tokens: int, horizon: int, positions: int | None) -> None:
    """InputError where prompt and horizon together need more positions than the model has; None where not known."""
    if positions is not None and prompt_tokens + horizon > positions:
        raise InputError(
            f"document '{doc}': a prompt of {prompt_tokens} tokens and a horizon of {horizon} exceed the {positions} "
            "positions of the model (max_position_embeddings)"
        )


def load_model(
    model_id: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
    device_map: str | None = None,
) -> LoadedModel:
    """Load ``kvdrift/tiny``, a local folder or a Hugging Face id through transformers.

    With ``device_map`` ("auto") transformers and accelerate spread the layers over the GPUs there are, and ``device``
    is not used. InputError, one line, for an unknown dtype or device, a folder without configuration or weights,
    weights that do not fill the model or do not fit the GPUs, and an architecture whose attention is not known to be
    plain causal.
    """
    check_model(model_id, dtype=dtype, revision=revision, device=device, device_map=device_map)
    source = _source(model_id)
    with _quiet():
        config = _config(source, model_id, revision)
        network = _network(source, model_id, revision, dtype, device_map)
        generation = network.generation_config
    device = _place(network, device, device_map)
    network.eval().requires_grad_(requires_grad=False)
    if sum(parameter.numel() for parameter in network.parameters()) < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    if torch.device(device).type == "cpu":
        replace_activations(network)
        replace_linear_layers(network)
    eos, positions = _eos_tokens(generation, config), config.max_position_embeddings
    shape = ModelShape.of(config.to_dict(), dtype)
    return LoadedModel(model_id, network, device, dtype, eos, positions, shape, find_row_multiple(network))


def load_tokenizer(model_id: str, *, revision: str | None = None) -> Any:
    """The model's tokenizer without the model, for prompts that are text; InputError where it has none for English."""
    if model_id == EMBEDDED_ID:
        raise InputError(f"model.id = '{model_id}': reads documents of the embedded source alone, not text")
    source = _source(model_id, weights=False)
    with _quiet():
        _config(source, model_id, revision)  # says in one line if there is no such model
        tokenizer = _tokenizer(source, revision)
    if tokenizer is None:
        raise InputError(f"model.id = '{model_id}': has no tokenizer, which prompts of text need")
    return tokenizer


def token_reader(model_id: str, *, revision: str | None = None) -> Callable[[int], str] | None:
    """A model's token ids as text, for people to read; None where its tokenizer is not to be had here."""
    try:
        with _quiet():
            tokenizer = _tokenizer(_source(model_id, weights=False), revision)
    except InputError:
        return None
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def _source(model_id: str, *, weights: bool = True) -> str:
    if model_id == EMBEDDED_ID:
        return str(EMBEDDED_FOLDER)
    folder = Path(model_id)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"model.id = '{model_id}': the folder has no config.json")
        if weights and not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
            raise InputError(f"model.id = '{model_id}': the folder has no weights (*.safetensors)")
        return str(folder)
    if model_id.startswith((".", "/", "~")):
        raise InputError(f"model.id = '{model_id}': no such folder")
    return model_id


def _config(source: str, model_id: str, revision: str | None) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InputError(f"model.id = '{model_id}': cannot load its configuration: {_first_line(error)}") from error


def _network(source: str, model_id: str, revision: str | None, dtype: str, device_map: str | None) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    try:
        network, loaded = loader.from_pretrained(
            source,
            revision=revision,
            dtype=DTYPES[dtype],
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            device_map=device_map,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise InputError(f"model.id = '{model_id}': cannot load its weights: {_first_line(error)}") from error
    # Transformers fills what the files lack with random numbers and only warns.
    if absent := sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]):
        raise InputError(
            f"model.id = '{model_id}': its weights lack {len(absent)} tensor(s) of the configured size: {absent[0]}"
        )
    return network


def _place(network: Any, device: str, device_map: str | None) -> str:
    """Move the network to the device, unless a device map has placed it; returns where its tokens go in."""
    if device_map is not None:
        if any(parameter.is_meta for parameter in network.parameters()):  # they lie on disk or in the host's memory
            problem = "the weights do not fit the memory of the devices here"
            raise InputError(f"model.device_map = '{device_map}': {problem}")
        return str(network.get_input_embeddings().weight.device)
    try:
        network.to(torch.device(device))
    except RuntimeError as error:  # out of memory
        raise InputError(f"model.device = '{device}': {_first_line(error)}") from error
    return device


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"model.device = '{device}': {_first_line(error)}") from error
    if torch.device(device).type == "meta":
        raise InputError(f"model.device = '{device}': computes nothing; write cpu, cuda or another device of torch")


def _tokenizer(source: str, revision: str | None) -> Any:
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    # Some architectures' tokenizers are made up where there are no files: they know special tokens alone.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _refuse_unsupported(config: Any, model_id: str) -> None:
    """InputError naming what of the configuration is not supported."""
    names = list(config.architectures or [])
    kinds = {ARCHITECTURES[name] for name in names if name in ARCHITECTURES}
    problem = None
    if config.model_type not in kinds:  # which decides the code that transformers takes
        what = f"architecture {', '.join(names) or 'unknown'}" + (f" as '{config.model_type}'" if kinds else "")
        family = "encoder-decoder " if getattr(config, "is_encoder_decoder", False) else ""
        problem = f"{family}{what} is not supported; supported: {', '.join(ARCHITECTURES)}"
    elif other := set(_layer_types(config)) - {"full_attention"}:
        kind = min(other)
        problem = f"{_ATTENTION.get(kind, f'attention of type {kind!r}')} is not supported"
    elif (config.rope_parameters or {}).get("rope_type") == "dynamic":
        problem = "RoPE of type 'dynamic' is not supported: its frequencies depend on the prompts that came before"
    if problem is not None:
        raise InputError(f"model.id = '{model_id}': {problem}")


def _layer_types(config: Any) -> list[str]:
    """The attention of each layer; architectures without such a list would ignore a window that stands there."""
    whole = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return list(getattr(config, "layer_types", None) or whole)


def _eos_tokens(generation: Any, config: Any) -> tuple[int, ...]:
    ids = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading without progress bars, advice and warnings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
