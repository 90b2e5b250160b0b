"""Engines by their names in study files, and the model of a study with an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from kvdrift.generator.documents.ends import TextEnds
from kvdrift.generator.engines.again import Again
from kvdrift.generator.engines.engine import Engine, Side
from kvdrift.generator.engines.http.engine import Servers, ServerSide, check_same_model, check_slots
from kvdrift.generator.engines.http.settings import OPENAI, Requests
from kvdrift.generator.engines.llama_cpp import LlamaCpp
from kvdrift.generator.engines.model import EngineModel
from kvdrift.generator.transformer.files.fingerprints import file_sha256, tokenizer_sha256
from kvdrift.generator.transformer.files.local_folders import gguf_file, model_location, tokenizer_location
from kvdrift.generator.transformer.files.text_ends import (
    ENDS_OF_LLAMA_CPP,
    SERVER,
    NamedToken,
    check_ends,
    fetch_generation_configuration,
    joined_ends,
    model_ends,
)
from kvdrift.generator.transformer.other_weights.named import check_equal_tokens
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import FLOOR_ACTION, HTTP, KERNEL_FLOOR_ACTION, LLAMA_CPP, ActionSection, ModelSection, Study

ENGINES: Final[dict[str, Callable[[], Engine]]] = {LLAMA_CPP: partial(LlamaCpp, file_sha256)}
"""Engines in this process."""


def engine_model(study: Study) -> EngineModel:
    """Make the model of a study with an engine; no weights are loaded."""
    name = study.model.engine or ""
    if name == HTTP:
        return _of_servers(study)
    if name not in ENGINES:
        raise InputError(f"model.engine = '{name}': {nearest(name, (*ENGINES, HTTP))}")
    section, engine = study.model, ENGINES[name]()
    file, asked = gguf_file(section.id, section.folder), section.settings or {}
    reference = engine.side(file, asked, "model.settings")
    sides: dict[str, Side] = {}
    for action in _actions(study):
        own = file if action.weights is None else gguf_file(action.weights, section.folder)
        side = engine.side(own, asked | (action.settings or {}), f"action '{action.name}'")
        _check_shared(action.name, reference, side)
        if action.name == KERNEL_FLOOR_ACTION:
            _check_same_cache(engine, reference, side)
        sides[action.name] = side
    ends = _ends(study, reference, sides, [(token, ENDS_OF_LLAMA_CPP) for token in reference.facts.eos_tokens])
    sides[FLOOR_ACTION] = Again(reference)
    return EngineModel(section.id, engine, reference, sides, _tokenizer(section, reference), study.law, ends)


def _of_servers(study: Study) -> EngineModel:
    """Return the model whose sides are servers; the reference's server has slots for the floor, too."""
    section = study.model
    engine, asked = Servers(Requests.of(section.requests or {})), section.settings or {}
    reference, floor = engine.side(section.url or "", asked, "model.url").halves()
    check_slots(reference, "model.url")
    if not reference.capabilities.full_laws and not study.law.greedy:
        raise InputError(
            f"model.settings: api = '{OPENAI}': has tokens and no laws, which is enough at temperature 0 alone; write "
            "temperature = 0 under [study]"
        )
    sides: dict[str, ServerSide] = {}
    for action in _actions(study):
        where = f"action '{action.name}'"
        side = engine.side(action.url or "", asked | (action.settings or {}), where)
        check_slots(side, where)
        _check_shared(action.name, reference, side)
        check_same_model(action.name, reference, side)
        sides[action.name] = side
    ends = _ends(study, reference, sides, _named_by_server(section, reference))
    if not ends.tokens and (study.study.eos is None or not reference.capabilities.full_laws):
        raise InputError(
            f"model.url: {section.url} does not say which tokens end a text, and '{tokenizer_location(section)}' has "
            "no tokenizer here that does; write their ids as eos under [study], as in eos = [2]"
        )
    ended: dict[str, Side] = {name: side.ending(ends.tokens) for name, side in (sides | {FLOOR_ACTION: floor}).items()}
    reference = reference.ending(ends.tokens)
    return EngineModel(section.id, engine, reference, ended, _tokenizer(section, reference), study.law, ends)


def _ends(study: Study, reference: Side, sides: Mapping[str, Side], named: Sequence[NamedToken]) -> TextEnds:
    """Return the tokens that end a text on all sides; refuse an action whose side says that others end one, too."""
    ends = joined_ends(study, reference.facts.vocabulary, named)
    for action, side in sides.items():
        check_ends(study, action, ends, side.facts.eos_tokens)
    return ends


def _named_by_server(section: ModelSection, reference: ServerSide) -> list[NamedToken]:
    """Return the tokens that end a text by the reference's server, or by the tokenizer's files if it does not say."""
    if reference.facts.eos_tokens:
        return [(token, SERVER) for token in reference.facts.eos_tokens]
    location = tokenizer_location(section)
    fetch_generation_configuration(location, section.revision)
    return model_ends(location, section.revision)


def _actions(study: Study) -> list[ActionSection]:
    return [action for action in study.actions if action.name != FLOOR_ACTION]


def _tokenizer(section: ModelSection, reference: Side) -> str | None:
    """Return SHA-256 of the tokenizer of prompts: the tokenizer that the study file names, or that of the weights."""
    if section.engine == HTTP:
        named = section.tokenizer is not None
    else:
        named = tokenizer_location(section) != model_location(section)
    if named:
        return tokenizer_sha256(tokenizer_location(section), section.revision)
    return reference.facts.tokenizer_sha256


def _check_same_cache(engine: Engine, reference: Side, side: Side) -> None:
    """Raise an error if a kernel floor has another cache than the reference."""
    for name in engine.fewer_bits:
        if side.asked[name] != (ours := reference.asked[name]):
            raise InputError(
                f"action '{KERNEL_FLOOR_ACTION}': {name} = {side.asked[name]!r}: a kernel floor has the reference's "
                f"cache, {ours!r}, computed by another kernel; give an action with another cache another name"
            )


def _check_shared(action: str, reference: Side, side: Side) -> None:
    """Raise an error if a side has other tokens than the reference, since there would be no pairs."""
    ours, theirs = reference.facts, side.facts
    check_equal_tokens(
        action,
        [
            ("a vocabulary of", ours.vocabulary, theirs.vocabulary),
            ("the tokenizer", ours.tokenizer_sha256, theirs.tokenizer_sha256),
        ],
    )
