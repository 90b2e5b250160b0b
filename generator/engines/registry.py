"""Engines by their names in study files, the model of a study with an engine, and the tokenizer of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvdrift.generator.engines.engine import Engine, Side
from kvdrift.generator.engines.http.connection import OPENAI, Requests
from kvdrift.generator.engines.http.engine import Servers, ServerSide, check_same_model, check_slots, server_tokenizer
from kvdrift.generator.engines.llama_cpp import LlamaCpp
from kvdrift.generator.engines.model import EngineModel, RepeatedReference
from kvdrift.generator.transformer.files.fingerprints import tokenizer_sha256
from kvdrift.generator.transformer.files.local_folders import local_configuration, tokenizer_of
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.text_ends import (
    NamedToken,
    TextEnds,
    check_ends,
    fetch_generation_configuration,
    joined_ends,
    model_ends,
)
from kvdrift.generator.transformer.files.tokenizer import load_tokenizer
from kvdrift.generator.transformer.other_weights.named import check_equal_tokens
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import (
    FLOOR_ACTION,
    HTTP,
    KERNEL_FLOOR_ACTION,
    LLAMA_CPP,
    TRANSFORMERS,
    ActionSection,
    ModelSection,
    Study,
)


def _transformers() -> Engine:
    """Make the engine of transformers, whose import takes seconds."""
    from kvdrift.generator.engines.transformers.engine import Transformers  # noqa: PLC0415

    return Transformers()


ENGINES: Final[dict[str, Callable[[], Engine]]] = {LLAMA_CPP: LlamaCpp, TRANSFORMERS: _transformers}
"""Engines in this process, by the name under ``[model] engine``."""


def engine_of(name: str) -> Engine:
    """Return the engine in this process that ``[model] engine`` names."""
    if name not in ENGINES:
        raise InputError(f"model.engine = '{name}': {nearest(name, (*ENGINES, HTTP))}")
    return ENGINES[name]()


def engine_model(study: Study) -> EngineModel:
    """Make the model of a study with an engine; no weights are loaded."""
    section = study.model
    if section.engine == HTTP:
        return _of_servers(study)
    engine, settings = engine_of(section.engine or ""), section.settings or {}
    location = engine.location(section.id, section.folder, "model.id = ")
    reference = engine.side(location, settings, "model.settings", section.folder)
    sides: dict[str, Side] = {}
    for action in _actions(study):
        where = f"action '{action.name}'"
        weights = action.weights and engine.location(action.weights, section.folder, f"{where}: weights = ")
        side = engine.side(weights or location, settings | (action.settings or {}), where, section.folder)
        _check_shared(action.name, reference, side)
        engine.check_beside(reference, side, where)
        if action.name == KERNEL_FLOOR_ACTION:
            _check_same_cache(engine, reference, side)
        sides[action.name] = side
    ends = _ends(study, reference, sides, [(token, engine.ends) for token in reference.facts.eos_tokens])
    sides[FLOOR_ACTION] = RepeatedReference(reference)
    own_tokenizer = section.tokenizer is None and engine.tokenizer(location) == location
    tokenizer = _tokenizer(section, reference, of_reference=own_tokenizer)
    return EngineModel(section.id, engine.description(), reference, sides, tokenizer, study.sampling, ends)


def tokenizer_location(section: ModelSection) -> str:
    """Return the place of a study's tokenizer: the model's, unless a study with an engine names a ``tokenizer``."""
    if section.engine is None:
        return model_location(section)
    if section.tokenizer is not None:
        beside = section.folder and section.folder / Path(section.tokenizer).expanduser()
        return str(beside) if beside is not None and beside.is_dir() else section.tokenizer
    if section.engine == HTTP:
        return tokenizer_of(section.id)  # a name of the user's own, or an id whose tokenizer prompts go through
    engine = engine_of(section.engine)
    return engine.tokenizer(engine.location(section.id, section.folder, "model.id = "))


def load_prompt_tokenizer(section: ModelSection) -> Any:
    """Load the tokenizer of a study's prompts: the reference server's, or else the one at ``tokenizer_location``."""
    return server_tokenizer(section) or load_tokenizer(tokenizer_location(section), revision=section.revision)


def _of_servers(study: Study) -> EngineModel:
    """Make the model of a study whose sides are servers; the floor has half of the slots of the reference's server."""
    section = study.model
    engine, settings = Servers(Requests.of(section.requests or {})), section.settings or {}
    configuration = local_configuration(tokenizer_location(section), section.revision)
    reference, floor = engine.side(section.url or "", settings, "model.url").sized(configuration).halves()
    check_slots(reference, "model.url")
    if not reference.capabilities.full_distributions and not study.sampling.greedy:
        raise InputError(
            f"model.settings: api = '{OPENAI}': returns tokens and no distributions, which is enough only at "
            "temperature 0; write temperature = 0 under [study]"
        )
    sides: dict[str, ServerSide] = {}
    for action in _actions(study):
        where = f"action '{action.name}'"
        side = engine.side(action.url or "", settings | (action.settings or {}), where).sized(configuration)
        check_slots(side, where)
        _check_shared(action.name, reference, side)
        check_same_model(action.name, reference, side)
        sides[action.name] = side
    ends = _ends(study, reference, sides, _named_by_server(section, reference))
    if not ends.tokens and (study.study.eos is None or not reference.capabilities.full_distributions):
        raise InputError(
            f"model.url: {section.url} does not report which tokens end a text, and '{tokenizer_location(section)}' "
            "has no tokenizer here that does; write their ids as eos under [study], as in eos = [2]"
        )
    ended: dict[str, Side] = {name: side.ending(ends.tokens) for name, side in (sides | {FLOOR_ACTION: floor}).items()}
    reference = reference.ending(ends.tokens)
    tokenizer = _tokenizer(section, reference, of_reference=section.tokenizer is None)
    return EngineModel(section.id, engine.description(), reference, ended, tokenizer, study.sampling, ends)


def _ends(study: Study, reference: Side, sides: Mapping[str, Side], named: Sequence[NamedToken]) -> TextEnds:
    """Return the tokens that end a text on all sides; refuse an action whose side reports further such tokens."""
    ends = joined_ends(study, reference.facts.vocabulary, named, tokenizer_location(study.model))
    for action, side in sides.items():
        check_ends(study, action, ends, side.facts.eos_tokens)
    return ends


def _named_by_server(section: ModelSection, reference: ServerSide) -> list[NamedToken]:
    """Return the tokens that end a text: the reference server's or, if it reports none, the tokenizer files'."""
    if reference.facts.eos_tokens:
        return [(token, "the server") for token in reference.facts.eos_tokens]
    location = tokenizer_location(section)
    fetch_generation_configuration(location, section.revision)
    return model_ends(location, section.revision)


def _actions(study: Study) -> list[ActionSection]:
    return [action for action in study.actions if action.name != FLOOR_ACTION]


def _tokenizer(section: ModelSection, reference: Side, *, of_reference: bool) -> str | None:
    """Return SHA-256 of the prompts' tokenizer: as the reference reports it if ``of_reference``, else of its files."""
    if of_reference:
        return reference.facts.tokenizer_sha256
    return tokenizer_sha256(tokenizer_location(section), section.revision)


def _check_same_cache(engine: Engine, reference: Side, side: Side) -> None:
    """Raise an error if ``side``, that of action ``kernel-floor``, stores entries in other types than the reference."""
    for name in engine.of_cache:
        ours, theirs = reference.requested[name], side.requested[name]
        if theirs != ours:
            raise InputError(
                f"action '{KERNEL_FLOOR_ACTION}': {name} = {theirs!r}: a kernel floor has the reference's cache, "
                f"{ours!r}, computed by another kernel; give an action with another cache another name"
            )


def _check_shared(action: str, reference: Side, side: Side) -> None:
    """Raise an error if a side's vocabulary or tokenizer differs from the reference's: tokens could not be compared.

    A server may have no tokenizer, as a vLLM started with --skip-tokenizer-init.
    """
    ours, theirs = reference.facts, side.facts
    pairs: list[tuple[str, object, object]] = [("a vocabulary of", ours.vocabulary, theirs.vocabulary)]
    tokenizers = ours.tokenizer_sha256, theirs.tokenizer_sha256
    if not isinstance(side, ServerSide) or None not in tokenizers:
        pairs.append(("the tokenizer", *tokenizers))
    check_equal_tokens(action, pairs)
