"""Confirmation of an exploration: a study file of chosen actions on documents that no study in the store has evaluated.

Generated prompts are drawn anew with another seed. For prompts from files, a second file beside the study file lists
the clusters of documents that studies in the store have seen, and the study file excludes these clusters.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.flows.material import gather_material
from kvdrift.flows.plan.stored_documents import SeenDocuments
from kvdrift.generator.documents.registry import excluded_clusters
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import KERNEL_FLOOR_ACTION, Study, load_studies
from kvdrift.schema.study.reading import of_each_temperature, read_content, toml_table
from kvdrift.stats.quantities import PAIR_QUANTITIES

_SEEDS = 20  # seeds that are tried


@dataclass(frozen=True)
class Confirmation:
    """The study file that ``write_confirmation`` wrote."""

    path: Path  # The file
    study: str  # The study's name
    seed: int  # Its seed
    actions: tuple[str, ...]  # Its actions, the baseline first
    documents: int  # How many evaluation documents it has; no study in the store has evaluated them


def write_confirmation(study_file: Path, names: Sequence[str], store: Store, path: Path | None = None) -> Confirmation:
    """Write a study file that confirms the explored actions ``names`` and the baseline; never overwrite a file.

    The new study is to be run in ``store``, that of the explored study. Its name is that of the file ``path``, by
    default NAME-confirm.toml beside the study file.
    """
    studies, content = load_studies(study_file), read_content(study_file)
    _check_actions(studies, names, study_file)
    taken = {row["study"] for row in store.read("studies", columns=["study"]).to_pylist()}
    path = path or study_file.with_name(f"{_free_name(studies[0].name_in_file, content, taken)}.toml")
    for name in _names(path.stem, content):
        if name in taken:
            raise InputError(
                f"{path}: the study would be named '{name}' after its file, and {store.location} has a study of that "
                "name; write to a file of another name"
            )
    baseline = studies[0].plan.baseline
    actions = (baseline, *(name for name in dict.fromkeys(names) if name != baseline))
    content["actions"] = [action for action in content["actions"] if action["name"] in (*actions, KERNEL_FLOOR_ACTION)]
    content["study"] = content["study"] | {"name": path.stem}
    excluded = path.with_name(f"{path.stem}-exclude.json")
    for section, part in zip(studies[0].documents, content["documents"], strict=True):
        if section.path is not None or section.exclude is not None:
            part["exclude"] = excluded.name
        if section.path is not None and path.parent.absolute() != study_file.parent.absolute():
            part["path"] = section.path
    _move_weights(content, study_file.parent.absolute(), path.parent.absolute())
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        seen = SeenDocuments.in_store(store)
        clusters = seen.clusters.union(*map(excluded_clusters, studies[0].documents))
        documents = _draw(content, draft, Path(folder) / excluded.name, path, seen, clusters)
        files = {path: _comments(path, study_file, actions, store) + _toml(content)}
        if any("exclude" in part for part in content["documents"]):
            files[excluded] = (draft.parent / excluded.name).read_text(encoding="utf-8")
    _write_new(files)
    return Confirmation(path, path.stem, content["study"]["seed"], actions, documents)


def _move_weights(content: dict[str, Any], before: Path, now: Path) -> None:
    """Rewrite relative paths of models, weights and tokenizers for a study file in another folder.

    Names that are not paths, such as Hugging Face ids, stay.
    """
    if before == now:
        return
    models = content["model"] if isinstance(content["model"], list) else [content["model"]]
    for section, key in (
        *((model, key) for model in models for key in ("id", "tokenizer")),
        *((action, "weights") for action in content["actions"]),
    ):
        location = section.get(key)
        if isinstance(location, str) and not Path(location).expanduser().is_absolute() and (before / location).exists():
            section[key] = os.path.relpath(before / location, now)


def _check_actions(studies: Sequence[Study], names: Sequence[str], study_file: Path) -> None:
    known = {action.name for action in studies[0].actions}
    for name in names:
        if name not in known:
            raise InputError(f"--action {name}: no such action in {study_file}; {nearest(name, known)}")
    contrasts = {name for name, quantity in PAIR_QUANTITIES.items() if quantity.kind == "contrast"}
    if contrasts.intersection(studies[0].plan.primary) and set(names) == {baseline := studies[0].plan.baseline}:
        raise InputError(
            f"--action {baseline}: is the baseline, which the new file has in any case; name an action to compare with "
            f"it: {', '.join(sorted(known - {baseline}))}"
        )
    if any(study.model.tables is not None for study in studies):
        raise InputError(
            f"{study_file}: its documents are the systems of model.tables, so there are no others to confirm on"
        )


def _write_new(files: dict[Path, str]) -> None:
    """Write the texts in ``files``, keyed by path, to new files; the first file is written last, after all others."""
    for file in files:
        if file.exists():
            raise InputError(f"{file}: is there already; remove it, or write to another file with -o")
    for file in reversed(files):
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(files[file])
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from None


def _free_name(study: str, content: dict[str, Any], taken: Collection[str]) -> str:
    """Return the first of NAME-confirm, NAME-confirm-2, … that the store does not have."""
    name, number = f"{study}-confirm", 1
    while any(study_name in taken for study_name in _names(name, content)):
        number += 1
        name = f"{study}-confirm-{number}"
    return name


def _names(name: str, content: dict[str, Any]) -> list[str]:
    """Return the names of the studies of a file with this name and content: one for each temperature."""
    return [
        section["study"]["name"]
        for section in of_each_temperature(content | {"study": content["study"] | {"name": name}})
    ]


def _draw(
    content: dict[str, Any], draft: Path, excluded: Path, path: Path, seen: SeenDocuments, clusters: set[str]
) -> int:
    """Find a seed, and clusters to exclude, so that no evaluation document was seen before; write the draft.

    ``clusters`` are excluded in any case. All excluded clusters are written to the file ``excluded``, which the draft
    names. The study file will be at ``path``. Returns the number of evaluation documents over all strata.
    """
    first = content["study"].get("seed", 0)
    seed = first + 1
    while seed <= first + _SEEDS:
        content["study"]["seed"] = seed
        excluded.write_text(json.dumps({"clusters": sorted(clusters)}, ensure_ascii=False, indent=1) + "\n", "utf-8")
        there = [part | {"exclude": str(excluded)} if "exclude" in part else part for part in content["documents"]]
        draft.write_text(_toml(content | {"documents": there}), "utf-8")
        documents, drawn, read = _met(draft, path, seen)
        if not (drawn or read):
            return documents
        clusters = clusters | read
        seed += drawn
    raise InputError(
        f"{draft.name}: each seed from {first + 1} to {seed - 1} draws a document that a study in the store has seen; "
        "take fewer evaluation documents"
    )


def _met(draft: Path, path: Path, seen: SeenDocuments) -> tuple[int, bool, set[str]]:
    """Make the evaluation documents of a draft, as from a study file at ``path``, and find the seen documents in them.

    Returns:
        The number of documents; whether a document that was drawn by the seed was seen; and the clusters of the seen
        documents that were read from files.
    """
    count, drawn, read = 0, False, set[str]()
    for study in load_studies(draft, path.parent):
        evaluation = gather_material(study).documents["evaluation"]
        count = sum(map(len, evaluation.values()))
        for section in study.documents:
            met = seen.among(evaluation[section.stratum_name], study.study.seed)
            if section.path is None:
                drawn = drawn or bool(met)
            else:
                read |= {document.cluster for document in met}
    return count, drawn, read


def _comments(path: Path, study_file: Path, actions: Sequence[str], store: Store) -> str:
    lines = [
        f"Written by kvdrift confirm from {study_file.name}: {', '.join(actions)},",
        "on evaluation documents that no study in the store had evaluated:",
        f"  {store.location}, events version {store.version('events')}",
        "See what it would cost and reach, then run it, both in the same store:",
        f"  kvdrift run {path} --store {store.location} --plan-only",
        f"  kvdrift run {path} --store {store.location}",
    ]
    return "".join(f"# {line}\n" for line in lines) + "\n"


def _toml(content: dict[str, Any]) -> str:
    """Write a study file's content as TOML: tables, lists of tables, and plain values in them."""
    parts = []
    for name, value in content.items():
        heading, tables = (f"[{name}]", [value]) if isinstance(value, dict) else (f"[[{name}]]", value)
        parts += [toml_table(heading, table) for table in tables]
    return "\n".join(parts)
