"""Loading a causal language model, and what is checked of it before it is trusted."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from generator.activation import replace_activations
from generator.attention import IMPLEMENTATION, ROW_MULTIPLE
from schema.errors import InputError, nearest

EMBEDDED_ID = "kvdrift/tiny"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded" / "checkpoint"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Below this size handing a matrix product to a second thread takes longer than computing it, and on a busy machine
# many times longer.
ONE_THREAD_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for coupled decoding."""

    id: str
    network: Any  # a transformers causal language model in evaluation mode
    tokenizer: Any  # None where the folder has none
    device: str
    dtype: str
    eos_tokens: tuple[int, ...]
    batch_invariant: bool

    def token_text(self, token: int) -> str:
        """The token as text, for people to read; its number where there is no tokenizer."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))


def check_model(model_id: str, *, dtype: str, revision: str | None) -> None:
    """What can be known of a model without loading it; raises as ``load_model``."""
    if dtype not in DTYPES:
        raise InputError(f"model.dtype = '{dtype}': {nearest(dtype, DTYPES)}")
    with _quiet():
        _refuse_unsupported(_config(_source(model_id), model_id, revision), model_id)


def load_model(
    model_id: str, *, device: str = "cpu", dtype: str = "float32", revision: str | None = None
) -> LoadedModel:
    """Load ``kvdrift/tiny``, a local folder or a Hugging Face id through transformers.

    InputError, one line, for an unknown dtype or device, a folder without configuration or weights, weights that do
    not fill the model, and an architecture whose attention is not known to be plain causal.
    """
    check_model(model_id, dtype=dtype, revision=revision)
    source = _source(model_id)
    with _quiet():
        config = _config(source, model_id, revision)
        network = _network(source, model_id, revision, dtype, device)
        tokenizer = _tokenizer(source, revision)
        generation = network.generation_config
    network.eval().requires_grad_(requires_grad=False)
    if torch.device(device).type == "cpu":
        replace_activations(network)
    if sum(parameter.numel() for parameter in network.parameters()) < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    invariant = rows_are_invariant(network, device)
    return LoadedModel(model_id, network, tokenizer, device, dtype, _eos_tokens(generation, config), invariant)


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


def rows_are_invariant(network: nn.Module, device: str) -> bool:
    """Start-up self-test: do a row's matrix products and activations depend on how many rows stand beside it?

    Row counts are multiples of ``ROW_MULTIPLE``, as in decoding. Every size of matrix product and of activation that
    the network holds is tried once; True where all rows agree bitwise.
    """
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    tried: dict[tuple[int, int], nn.Module] = {(m.in_features, m.out_features): m for m in layers}
    for module in network.modules():
        if isinstance(activation := getattr(module, "act_fn", None), nn.Module):
            tried[module.get_submodule("down_proj").weight.shape[-1], 0] = activation  # type: ignore[index]
    generator = torch.Generator().manual_seed(0)
    dtype = next(network.parameters()).dtype
    for (width, _), module in tried.items():
        rows = torch.randn(8 * ROW_MULTIPLE, width, generator=generator).to(device, dtype)
        whole = module(rows)
        for count in (ROW_MULTIPLE, 2 * ROW_MULTIPLE, 3 * ROW_MULTIPLE, 5 * ROW_MULTIPLE, 7 * ROW_MULTIPLE):
            for part in (slice(count), slice(-count, None)):
                if not torch.equal(module(rows[part]), whole[part]):
                    return False
    return True


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
        return transformers.AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InputError(f"model.id = '{model_id}': cannot load its configuration: {_first_line(error)}") from error


def _network(source: str, model_id: str, revision: str | None, dtype: str, device: str) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    try:
        network, loaded = loader.from_pretrained(
            source,
            revision=revision,
            dtype=DTYPES[dtype],
            attn_implementation=IMPLEMENTATION,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model.id = '{model_id}': cannot load its weights: {_first_line(error)}") from error
    # Transformers fills what the files lack with random numbers and only warns.
    if absent := sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]):
        raise InputError(
            f"model.id = '{model_id}': its weights lack {len(absent)} tensor(s) of the configured size: {absent[0]}"
        )
    try:
        return network.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"model.device = '{device}': {_first_line(error)}") from error


def _tokenizer(source: str, revision: str | None) -> Any:
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError):
        return None
    # Some architectures' tokenizers are made up where there are no files: they know special tokens alone.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _refuse_unsupported(config: Any, model_id: str) -> None:
    names = list(config.architectures or [])
    if not any(name in ARCHITECTURES for name in names):
        raise InputError(
            f"model.id = '{model_id}': architecture {', '.join(names) or 'unknown'} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise InputError(f"model.id = '{model_id}': sliding-window attention is not supported")


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
