"""The strata of a JSON Lines file: how many documents each has, and how many tokens its prompts have."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvdrift.generator.documents.files import read_rows
from kvdrift.generator.documents.jsonl import TASK, cluster_of, cluster_splits
from kvdrift.generator.documents.prompts import Tokenizer
from kvdrift.generator.documents.registry import SOURCES, divided
from kvdrift.generator.llama_cpp.gguf import check_is_gguf, gguf_facts
from kvdrift.generator.llama_cpp.library import INSTALL, PACKAGE
from kvdrift.generator.transformer.files.configuration import position_limit
from kvdrift.generator.transformer.files.local_folders import local_folder, model_folder
from kvdrift.generator.transformer.files.tokenizer import is_on_hub, load_tokenizer
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection
from kvdrift.schema.study.model import GGUF
from kvdrift.schema.study.reading import expanded
from kvdrift.study_files.commented import Table

_LEAST = 2  # documents of a stratum in each split
_MOST = {"development": 8, "evaluation": 48}  # documents of a stratum that is read from a file
_SPECIAL_TOKENS = 64  # most tokens that a tokenizer adds to a prompt, a chat template's included
_BLOCK = 64  # lengths are multiples of this many tokens, if the model has as many positions
_NAMED = 5  # documents that a line lists


@dataclass(frozen=True)
class TextModel:
    """The properties of a model that reads text, as far as this machine has them.

    Attributes:
        name: The model as the user named it.
        tokenizer: The tokenizer of prompts; None if it cannot be loaded here.
        positions: The largest number of tokens, prompt and generated ones; None if it is unknown.
        lacking: The reason why the tokenizer cannot be loaded; empty if it is loaded.
    """

    name: str
    tokenizer: Tokenizer | None
    positions: int | None
    lacking: str = ""

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer is known to have a chat template."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    @property
    def unknown_tokenizer(self) -> str:
        """The beginning of a line about an unknown tokenizer, with the reason."""
        return f"the tokenizer of '{self.name}' cannot be loaded ({self.lacking})"

    def most_tokens(self, horizon: int) -> int | None:
        """Return the most tokens of a prompt that leaves room for ``horizon`` tokens; None if it is unknown."""
        return None if self.positions is None else self.positions - horizon


def text_model(location: str) -> TextModel:
    """Return the properties of a model: a GGUF file, a folder, or a Hugging Face id, whose tokenizer is downloaded.

    Raises:
        InputError: The file or folder cannot be read, or has no tokenizer; the hub has no such model.
    """
    if location.endswith(GGUF):
        return _of_gguf(Path(location))
    if local_folder(location) is None and model_folder(location) is None:
        there = is_on_hub(location, None)
        if there is None:
            return TextModel(location, None, None, "the hub cannot be reached, or refuses access")
        if not there:
            raise InputError(f"--model {location}: the hub has no such model, or it is private")
    tokenizer: Any = load_tokenizer(location)
    return TextModel(location, tokenizer, position_limit(location))


def _of_gguf(file: Path) -> TextModel:
    check_is_gguf(file)
    if find_spec(PACKAGE) is None:
        return TextModel(str(file), None, None, f"it needs the package {PACKAGE}: {INSTALL}")
    return TextModel(str(file), load_tokenizer(str(file)), gguf_facts(file).positions or None)


@dataclass(frozen=True)
class OwnPrompts:
    """The strata of a file of prompts.

    Attributes:
        strata: The keys and values of each stratum's section ``[[documents]]``.
        too_long: The clusters of documents that are too long for the model or for the user's bound.
        remark: A line about documents that are too long, or about estimated lengths; empty if there are none.
        shortest: The id of the shortest prompt, and its number of tokens; None if prompts were not counted.
    """

    strata: list[Table]
    too_long: list[str]
    remark: str
    shortest: tuple[str, int] | None = None


def own_prompts(documents: Path, folder: Path, length: int | None, model: TextModel, horizon: int) -> OwnPrompts:
    """Return the strata that a file's rows name, or one stratum of all rows, with at most ``_MOST`` documents each.

    Prompts are counted as a run counts them: by the model's tokenizer, with its chat template if it has one. If the
    tokenizer is not known, the length is estimated as one token for each byte of a row.

    The path in the strata is relative to ``folder``, which has the study file. ``length`` is the user's bound of a
    prompt's tokens; if it is None, a prompt and the ``horizon`` H must fit into the model's positions.
    """
    if not documents.is_file():
        raise InputError(f"--documents {documents}: no such file, expected JSON Lines with id and prompt")
    rows = [row for _, row in read_rows(documents)]
    named = list(dict.fromkeys(row.text("stratum") for row in rows if row.has("stratum")))
    strata = named or [re.sub(r"[^A-Za-z0-9._-]+", "-", documents.stem).lstrip("._-") or "prompts"]
    bounds = [bound for bound in (length, model.most_tokens(horizon)) if bound is not None]
    too_long, remark = dict[str, str](), ""
    shortest: tuple[str, int] | None = None
    if model.tokenizer is None:
        texts = (json.dumps(row.fields, ensure_ascii=False) for row in rows)
        longest = max((len(text.encode()) for text in texts), default=0) + _SPECIAL_TOKENS
        uncounted = "prompts are not counted" if length else "length is an estimate of a token for each byte"
        remark = f"{model.unknown_tokenizer}: {uncounted}, and chat_template is not set"
    else:
        counted = dict[str, tuple[str, int]]()
        for stratum in strata:
            counted |= _counted(documents, stratum, model, model.tokenizer)
        beyond = {doc: counts for doc, counts in counted.items() if bounds and counts[1] > min(bounds)}
        too_long = {doc: cluster for doc, (cluster, _) in beyond.items()}
        clusters = set(too_long.values())
        kept = {doc: tokens for doc, (cluster, tokens) in counted.items() if cluster not in clusters}
        longest = max(kept.values(), default=1)
        shortest = min(kept.items(), key=lambda item: item[1], default=None)
        if too_long:
            remark = _too_long(documents, beyond, len(counted), model, None if length else horizon, min(bounds))
    most = length or min([-(-longest // _BLOCK) * _BLOCK, *bounds])
    relative = os.path.relpath(expanded(str(documents)).absolute(), folder)
    splits, tables = cluster_splits([documents]), []
    for stratum in strata:
        stratum_rows = [row for row in rows if not named or not row.has("stratum") or row.text("stratum") == stratum]
        counts = _counts(documents, stratum, list(map(cluster_of, stratum_rows)), set(too_long.values()), splits)
        chat = {"chat_template": True} if model.has_chat_template else {}
        tables.append({"source": "jsonl", "path": relative, "length": most, "stratum": stratum, **chat, **counts})
    return OwnPrompts(tables, sorted(set(too_long.values())), remark, shortest)


def _counted(documents: Path, stratum: str, model: TextModel, tokenizer: Tokenizer) -> dict[str, tuple[str, int]]:
    """Return the cluster and the number of prompt tokens of each document of a stratum, by the document's id."""
    source = SOURCES["jsonl"]
    section = DocumentsSection(
        source="jsonl", path=str(documents), stratum=stratum, development=2, evaluation=2,
        chat_template=model.has_chat_template or None,
    ).model_copy(update={"length": sys.maxsize})  # fmt: skip
    candidates = list(source.candidates(section, TASK, 0))
    made = source.documents(section, candidates, tokenizer, 0)
    return {document.doc: (document.cluster, document.prompt_tokens) for document in made}


def _too_long(
    documents: Path, beyond: dict[str, tuple[str, int]], total: int, model: TextModel, horizon: int | None, most: int
) -> str:
    """Return a line on the documents, of ``total``, whose prompts are longer than a bound of ``most`` tokens.

    ``beyond`` has their clusters and numbers of tokens by id; ``horizon`` is None if the user chose the bound.
    """
    bound = f"{most:,} tokens"
    if horizon is not None:
        bound = f"the {bound} that a horizon of {horizon} leaves of the model's {model.positions:,} positions"
    listed = ", ".join(f"{doc} ({tokens:,})" for doc, (_, tokens) in list(beyond.items())[:_NAMED])
    more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
    which = f"{len(beyond)} of {total} documents {'is' if len(beyond) == 1 else 'are'} longer than {bound}"
    return f"{documents}: {which}, and left out with their clusters: {listed}{more}"


def _counts(
    documents: Path, stratum: str, clusters: Sequence[str], left_out: Collection[str], splits: Mapping[str, str]
) -> dict[str, int]:
    """Return how many documents of each split a study takes of a stratum; refuse a stratum that has too few.

    ``clusters`` has the cluster of each row of the stratum, ``left_out`` the clusters to leave out, and ``splits`` the
    split of each cluster whose rows name one.
    """
    sizes = Counter(cluster for cluster in clusters if cluster not in left_out)
    taken, there = divided(sizes, dict.fromkeys(_MOST, _LEAST), splits), Counter[str]()
    for cluster, size in sizes.items():
        there[taken[cluster]] += size
    for split in _MOST:
        if there[split] < _LEAST:
            raise InputError(
                f"--documents {documents}: {sizes.total()} row(s) of '{stratum}' are too few: {there[split]} on the "
                f"{split} side of the split, and a study needs {_LEAST} on each side; rows of one cluster stay "
                "together"
            )
    return {split: min(there[split], at_most) for split, at_most in _MOST.items()}
