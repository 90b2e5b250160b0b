"""A new study file, made from a few options: the model, prompts for the model, and actions."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.flows.material import check_retentions, checked_actions
from kvdrift.generator.documents.registry import SOURCES, check_source
from kvdrift.generator.engines.http.connection import VLLM
from kvdrift.generator.engines.llama_cpp import ContextSettings
from kvdrift.generator.engines.registry import ENGINES
from kvdrift.generator.transformer.files.local_folders import (
    EMBEDDED_GGUF,
    EMBEDDED_ID,
    check_hub_id,
    gguf_file,
    local_folder,
)
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import HTTP, KERNEL_FLOOR_ACTION, LLAMA_CPP, ModelSection, load_studies
from kvdrift.schema.study.model import GGUF
from kvdrift.study_files.commented import Table, commented_study
from kvdrift.study_files.examples import check_absent, write_files
from kvdrift.study_files.own_prompts import OwnPrompts, TextModel, own_prompts, text_model

_EMBEDDED = "kvdrift/tiny-F32.gguf"
_CACHE_TYPES = ("q8_0", "q4_0")
_REFERENCE: Table = {"type_k": "f16", "type_v": "f16"}
DEFAULT_ACTIONS = ("snapkv-half=snapkv:1/2", "recent-half=recent:1/2")
_HORIZON = 64
_EMBEDDED_LENGTHS = (384, 768)
_RULER_LENGTH = 4096
_RULER_TASKS = ("niah_single_1", "vt")
_COUNTS = {"development": 3, "evaluation": 10}  # documents of a stratum whose prompts are made here


@dataclass(frozen=True)
class Decoder:
    """What decodes a new study: kvdrift itself, llama.cpp, or servers.

    Attributes:
        model: The keys and values of ``[model]``.
        actions: The keys and values of each action; the first is the baseline.
        reader: The place of the tokenizer; None for the embedded model, which cannot read text.
    """

    model: Table
    actions: Sequence[Table]
    reader: str | None


def own_decoder(model: str, actions: Sequence[Table], folder: Path) -> Decoder:
    """Return what a study file in ``folder`` needs if kvdrift itself decodes the model."""
    actions = actions or [named_action(text) for text in DEFAULT_ACTIONS]
    if model == EMBEDDED_ID:
        return Decoder({"id": model}, actions, None)
    reader, local = _reader(model), local_folder(model)
    if local is not None and not model.startswith(("/", "~")):
        model = os.path.relpath(local.absolute(), folder)
        model = model if model.startswith("..") else f"./{model}"
    elif local is None and Path(model).expanduser().is_file():
        raise InputError(f"--model {model}: is a file; name the model's folder, a Hugging Face id or a file *{GGUF}")
    elif local is None and model.startswith((".", "/", "~")):
        raise InputError(f"--model {model}: no such folder")
    elif local is None:
        check_hub_id(model, Path.cwd(), "--model ")
    return Decoder({"id": model, "device": "cpu", "dtype": "float32"}, actions, reader)


def served_decoder(model: str, servers: Sequence[str], folder: Path) -> Decoder:
    """Return the servers of ``--vllm`` as decoders: the address of the reference, then NAME=URL of each action."""
    reference, *others = servers
    named = dict(other.partition("=")[::2] for other in others)
    if "=" in reference or not named or len(named) < len(others) or not all(named) or not all(named.values()):
        raise InputError(
            f"--vllm {' --vllm '.join(servers)}: write the reference's URL first, then NAME=URL for each action, as in "
            "--vllm http://127.0.0.1:8001 --vllm fp8=http://127.0.0.1:8002"
        )
    local = None if model == EMBEDDED_ID else local_folder(model)
    place: Table = {"id": model} if local is None else {
        "id": local.absolute().name, "tokenizer": os.path.relpath(local.absolute(), folder)
    }  # fmt: skip
    table = {"engine": HTTP, **place, "url": reference, "settings": {"api": VLLM, "processor": True}}
    actions = [{"name": name, "url": url} for name, url in named.items()]
    return Decoder(table, actions, None if model == EMBEDDED_ID else _reader(model))


def llama_cpp_decoder(
    model: str, engine: str | None, gguf: Path | None, cache_types: str | None, weights: Sequence[Path], folder: Path
) -> Decoder | None:
    """Return llama.cpp with the options of ``kvdrift init``; None if neither an engine nor a GGUF file is named.

    The file, named by ``--model`` or ``--gguf``, is that of the embedded model by default. The actions are those of the
    cache types, of which ``K/V`` names two, then those of the weights, then the kernel floor.
    """
    by_model = model.endswith(GGUF)
    if engine is None and gguf is None and not by_model:
        options = {"--cache-types": cache_types is not None, "--weights": bool(weights)}
        if option := next((name for name, there in options.items() if there), None):
            raise InputError(f"{option}: belongs to an engine; add --model FILE{GGUF}, or --engine {LLAMA_CPP}")
        return None
    if engine in {HTTP, *ENGINES} - {LLAMA_CPP}:
        raise InputError(f"--engine {engine}: kvdrift init cannot write its study file; kvdrift list keys has all keys")
    if engine not in (None, LLAMA_CPP):
        raise InputError(f"--engine {engine}: {nearest(engine, ENGINES)}")
    if gguf is not None and model != EMBEDDED_ID:
        raise InputError(f"--model {model}: --gguf names the model already; leave one of the two out")
    if gguf is not None and gguf.suffix != GGUF:
        raise InputError(f"--gguf {gguf}: the name of a GGUF file must end in {GGUF}")
    if gguf is None and not by_model and model != EMBEDDED_ID:
        raise InputError(f"--model {model}: engine {LLAMA_CPP} reads a GGUF file, *{GGUF}")
    kinds = [] if cache_types is None else [kind.strip() for kind in cache_types.split(",") if kind.strip()]
    for kind in kinds:
        ContextSettings.of(_types(kind), f"--cache-types {kind}")
    named = Path(model) if by_model else gguf or Path(_EMBEDDED)
    table: Table = {
        "engine": LLAMA_CPP, "id": _named(named, folder, "--model" if by_model else "--gguf"), "settings": _REFERENCE,
    }  # fmt: skip
    kinds = kinds or ([] if weights else [*_CACHE_TYPES])
    actions: list[Table] = [{"name": "cache-" + kind.replace("/", "-"), "settings": _types(kind)} for kind in kinds]
    actions += [{"name": file.stem, "weights": _named(file, folder, "--weights")} for file in weights]
    kernel = ModelSection(engine=LLAMA_CPP, id=_EMBEDDED, settings=_REFERENCE).other_kernel
    file = gguf_file(str(named))
    reader = None if file.parent == EMBEDDED_GGUF else str(file)
    return Decoder(table, [*actions, {"name": KERNEL_FLOOR_ACTION, "settings": kernel}], reader)


def _types(kind: str) -> Table:
    """Return the settings for one cache type, or for two as in ``q8_0/q4_0``."""
    keys, _, values = kind.partition("/")
    return {"type_k": keys, "type_v": values or keys}


def _named(file: Path, folder: Path, option: str) -> str:
    """Return a GGUF file as a study file in ``folder`` names it; an error names the ``option`` that gave the file."""
    if gguf_file(str(file)).parent == EMBEDDED_GGUF:
        return str(file)
    if not file.expanduser().is_file():
        raise InputError(f"{option} {file}: no such file")
    return os.path.relpath(file.expanduser().absolute(), folder)


def new_study(
    path: Path, decoder: Decoder, documents: Path | None, tasks: Sequence[str], length: int | None, horizon: int | None
) -> tuple[str, OwnPrompts]:
    """Return the text of a new study file ``path``, and its prompts; ``write_study`` checks the text by the schema.

    The model's tokenizer, if it can be loaded, counts the prompts of ``documents``. Prompts longer than
    ``length``, or so long that the model has no positions left for the horizon, are left out with their clusters.

    The path of ``documents`` is relative to the working folder. Without ``documents``, the study has prompts of the
    ``tasks``, which kvdrift makes. ``length`` is the most tokens of a prompt, ``horizon`` is H in tokens.
    """
    reader, tokens = None if decoder.reader is None else text_model(decoder.reader), horizon or _HORIZON
    if reader is not None and (most := reader.most_tokens(tokens)) is not None and most < (length or 1):
        option = f"--horizon {tokens}" if length is None else f"--length {length}"
        raise InputError(
            f"{option}: the model has {reader.positions:,} positions, and a horizon of {tokens} leaves "
            f"{max(most, 0):,} of them to a prompt"
        )
    if documents is not None:
        if tasks:
            raise InputError("--task: names prompts that kvdrift makes; leave --documents out, or --task")
        if reader is None:
            raise InputError(f"--documents {documents}: the embedded model reads no text; give --model too")
        prompts = own_prompts(documents, path.absolute().parent, length, reader, tokens)
        comment = f"The prompts are from {documents.name}; the counts follow from its rows."
    else:
        prompts, comment = _made_prompts(tasks, length, reader, tokens), ""
    for stratum in prompts.strata if prompts.too_long else []:
        stratum["exclude"] = _exclude_file(path).name
    study: Table = {"name": _study_name(path), "horizon": tokens, "seed": 0, "temperature": 1.0}
    return commented_study(study, decoder.model, prompts.strata, decoder.actions, comment, path.name), prompts


def write_study(path: Path, text: str, prompts: OwnPrompts) -> None:
    """Write a study file, and beside it a file of excluded clusters, if the schema accepts it; overwrite no file."""
    files = {path: text}
    if prompts.too_long:
        clusters = json.dumps({"clusters": prompts.too_long}, ensure_ascii=False, indent=1) + "\n"
        files = {_exclude_file(path): clusters, **files}
    check_absent(files)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        for study in load_studies(draft, path.parent):
            actions = checked_actions(study)
            if prompts.shortest is not None:
                doc, tokens = prompts.shortest
                check_retentions(actions, tokens, f"document '{doc}'")
            for section in study.documents:
                check_source(section)
    write_files(files)


def _exclude_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-exclude.json")


def _reader(model: str) -> str:
    """Return where the tokenizer of ``--model`` is: its folder, or the Hugging Face id."""
    local = local_folder(model)
    return model if local is None else str(local)


def _study_name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")
    return name[:80] or "my-study"


def _made_prompts(tasks: Sequence[str], length: int | None, model: TextModel | None, horizon: int) -> OwnPrompts:
    """Return the strata of generated prompts: one for each length of the embedded source, or each task of RULER.

    ``model`` is None for the embedded model.
    """
    source = "embedded" if model is None else "ruler"
    known = SOURCES[source].generated
    for task in tasks:
        if task not in known:
            raise InputError(f"--task {task}: kvdrift makes no such prompts for this model; {nearest(task, known)}")
    chosen = list(dict.fromkeys(tasks)) or (list(known) if model is None else list(_RULER_TASKS))
    lengths, remark = [*_EMBEDDED_LENGTHS], ""
    chat: Table = {}
    if model is not None:
        most = model.most_tokens(horizon)
        lengths = [_RULER_LENGTH if most is None else min(_RULER_LENGTH, most)]
        chat = {"chat_template": True} if model.has_chat_template else {}
        remark = f"{model.unknown_tokenizer}: chat_template is not set" if model.tokenizer is None else ""
    strata = [
        {"source": source, "tasks": [task], "length": tokens, "stratum": f"{task}-{tokens}", **chat, **_COUNTS}
        for task in chosen
        for tokens in (lengths if length is None else [length])
    ]
    return OwnPrompts(strata, [], remark)


def named_action(text: str) -> Table:
    """Return the action that an option names as NAME=SELECTOR:KEEP."""
    name, equals, policy = text.partition("=")
    selector, colon, keep = policy.rpartition(":")
    if not (equals and colon and name and selector and keep):
        raise InputError(f"--action {text}: write NAME=SELECTOR:KEEP, as in snapkv-half=snapkv:1/2")
    return {"name": name, "selector": selector, "keep": _kept(keep)}


def swept_action(text: str) -> Table:
    """Return the sweep that an option names as SELECTOR:KEEP,KEEP; the sweep's name is the selector's."""
    selector, colon, listed = text.rpartition(":")
    values = [value.strip() for value in listed.split(",")]
    if not (colon and selector and all(values)) or len(values) < 2:
        raise InputError(f"--sweep {text}: write SELECTOR:KEEP,KEEP, as in snapkv:3/4,1/2,1/4")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", selector).lstrip("._-") or "sweep"
    return {"name": name, "selector": selector, "keep": [_kept(value) for value in values]}


def _kept(keep: str) -> Any:
    return int(keep) if keep.isdecimal() else keep
