"""A new study file, made from a few options: the model, prompts for the model, and actions."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.material import checked_actions
from generator.documents.files import read_rows
from generator.documents.jsonl import cluster_of, cluster_splits
from generator.documents.registry import SOURCES, check_source
from generator.documents.splits import divided
from generator.transformer.files.local_folders import EMBEDDED_ID, check_hub_id, local_folder
from kvdrift.study_files.commented import Draft, Table, commented_study
from kvdrift.study_files.engine_study import EngineChoice
from schema.errors import InputError, nearest
from schema.study import load_studies
from schema.study.reading import expanded

DEFAULT_ACTIONS = ("snapkv-half=snapkv:1/2", "recent-half=recent:1/2")
_HORIZON = 64
_EMBEDDED_LENGTHS = (384, 768)
_RULER_LENGTH = 4096
_RULER_TASKS = ("niah_single_1", "vt")
_COUNTS = {"development": 3, "evaluation": 10}  # documents of a stratum whose prompts are made here
_LEAST = 2  # documents of a stratum in each split
_MOST = {"development": 8, "evaluation": 48}  # documents of a stratum that is read from a file
_SPECIAL_TOKENS = 64  # most tokens that a tokenizer adds to a prompt, a chat template's included
_BLOCK = 64  # lengths are multiples of this many tokens


def new_study(
    path: Path,
    model: str,
    documents: Path | None,
    tasks: Sequence[str],
    length: int | None,
    actions: Sequence[Table],
    horizon: int | None,
    engine: EngineChoice | None = None,
) -> str:
    """Return the text of a new study file, which the schema accepts.

    Args:
        path: the file that the text is for.
        model: a folder, from the working folder on, a Hugging Face id or the embedded model's.
        documents: a JSON Lines file of prompts, from the working folder on.
        tasks: tasks of the source that makes prompts for the model, if no file is given.
        length: the most tokens of a prompt.
        actions: values of each action, the baseline first; two actions by default.
        horizon: H in tokens.
        engine: what decodes in place of kvdrift, with its actions.
    """
    folder = path.absolute().parent
    embedded = model == EMBEDDED_ID if engine is None else engine.embedded
    if engine is not None and (model != EMBEDDED_ID or actions):
        raise InputError(
            f"--{'action' if actions else 'model'}: not for engine {engine.engine}; "
            "use --gguf, --cache-types and --weights"
        )
    if documents is not None:
        if tasks:
            raise InputError("--task: names prompts that kvdrift makes; leave --documents out, or --task")
        if embedded:
            raise InputError(f"--documents {documents}: {EMBEDDED_ID} reads no text; give --model too, or --gguf")
        strata = _file_strata(documents, folder, length)
        remark = f"The prompts are from {documents.name}; the counts follow from its rows."
    else:
        strata, remark = _made_strata(tasks, length, embedded=embedded), ""
    return commented_study(
        Draft(
            study={"name": _study_name(path), "horizon": horizon or _HORIZON, "seed": 0, "temperature": 1.0},
            model=_model(model, folder, embedded=embedded) if engine is None else engine.model(folder),
            documents=strata,
            actions=actions or [named_action(text) for text in DEFAULT_ACTIONS]
            if engine is None
            else engine.actions(folder),
            remarks={"documents": remark} if remark else {},
        ),
        path.name,
    )


def write_study(path: Path, text: str) -> None:
    """Write a new study file if the schema accepts its text; never overwrite a file."""
    if path.exists():
        raise InputError(f"{path}: is there already; remove it, or give another name")
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        for study in load_studies(draft, path.parent):
            checked_actions(study)
            for section in study.documents:
                check_source(section)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def _study_name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")
    return name[:80] or "my-study"


def _model(model: str, folder: Path, *, embedded: bool) -> Table:
    found = None if embedded else local_folder(model)
    if found is not None and not model.startswith(("/", "~")):
        model = os.path.relpath(found.absolute(), folder)
        model = model if model.startswith("..") else f"./{model}"
    elif found is None and model.startswith((".", "/", "~")):
        raise InputError(f"--model {model}: no such folder")
    elif found is None and not embedded:
        check_hub_id(model, Path.cwd(), "--model ")
    return {"id": model} if embedded else {"id": model, "device": "cpu", "dtype": "float32"}


def _made_strata(tasks: Sequence[str], length: int | None, *, embedded: bool) -> list[Table]:
    """Return the strata of generated prompts: one for each length of the embedded source, or each task of RULER."""
    source = "embedded" if embedded else "ruler"
    known = SOURCES[source].generated
    for task in tasks:
        if task not in known:
            raise InputError(f"--task {task}: no task that is made here for this model; {nearest(task, known)}")
    chosen = list(dict.fromkeys(tasks)) or (list(known) if embedded else list(_RULER_TASKS))
    lengths = [length] if length is not None else [*_EMBEDDED_LENGTHS] if embedded else [_RULER_LENGTH]
    return [
        {"source": source, "tasks": [task], "length": one, "stratum": f"{task}-{one}", **_COUNTS}
        for task in chosen
        for one in lengths
    ]


def _file_strata(documents: Path, folder: Path, length: int | None) -> list[Table]:
    """Return the strata that a file's rows name, or one stratum of all rows, each with all of the file's documents."""
    if not documents.is_file():
        raise InputError(f"--documents {documents}: no such file, expected JSON Lines with id and prompt")
    rows = [row for _, row in read_rows(documents)]
    longest = max((len(row.text("prompt").encode()) for row in rows), default=0) + _SPECIAL_TOKENS
    most = length or -(-longest // _BLOCK) * _BLOCK
    named = list(dict.fromkeys(row.text("stratum") for row in rows if row.has("stratum")))
    relative = os.path.relpath(expanded(str(documents)).absolute(), folder)
    splits = cluster_splits([documents])
    strata: list[Table] = []
    for stratum in named or [re.sub(r"[^A-Za-z0-9._-]+", "-", documents.stem).lstrip("._-") or "prompts"]:
        own = [row for row in rows if not named or not row.has("stratum") or row.text("stratum") == stratum]
        sizes = Counter(map(cluster_of, own))
        taken, there = divided(sizes, dict.fromkeys(_MOST, _LEAST), splits), Counter[str]()
        for cluster, size in sizes.items():
            there[taken[cluster]] += size
        counts = {split: min(there[split], at_most) for split, at_most in _MOST.items()}
        for split, count in counts.items():
            if count < _LEAST:
                raise InputError(
                    f"--documents {documents}: {len(own)} row(s) of '{stratum}' are too few: {there[split]} on the "
                    f"{split} side of the split, and a study needs {_LEAST} on each side; rows of one cluster stay "
                    "together"
                )
        strata.append({"source": "jsonl", "path": relative, "length": most, "stratum": stratum, **counts})
    return strata


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
    values = [one.strip() for one in listed.split(",")]
    if not (colon and selector and all(values)) or len(values) < 2:
        raise InputError(f"--sweep {text}: write SELECTOR:KEEP,KEEP, as in snapkv:3/4,1/2,1/4")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", selector).lstrip("._-") or "sweep"
    return {"name": name, "selector": selector, "keep": [_kept(one) for one in values]}


def _kept(keep: str) -> Any:
    return int(keep) if keep.isdecimal() else keep
