"""Engines by the names that study files give them, and the model that a study file makes of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from generator.engines.again import Again
from generator.engines.engine import Engine, Side
from generator.engines.llama_cpp import LlamaCpp
from generator.engines.model import EngineModel
from generator.transformer.fingerprints import tokenizer_sha256
from generator.transformer.local_folders import gguf_file, model_location, tokenizer_location
from schema.errors import InputError, nearest
from schema.study import FLOOR_ACTION, Study

ENGINES: Final[dict[str, Callable[[], Engine]]] = {"llama.cpp": LlamaCpp}


def engine_model(study: Study) -> EngineModel:
    """Make the model of a study with an engine; no weights are loaded.

    Raises:
        InputError: An unknown engine or setting, weights that cannot be read, or sides that share no vocabulary.
    """
    section = study.model
    name = section.engine or ""
    if name not in ENGINES:
        raise InputError(f"model.engine = '{name}': {nearest(name, ENGINES)}")
    engine, file = ENGINES[name](), gguf_file(section.id, section.folder)
    asked = section.settings or {}
    reference = engine.side(file, asked, "model.settings")
    sides: dict[str, Side] = {}
    for action in (one for one in study.actions if one.name != FLOOR_ACTION):
        own = file if action.weights is None else gguf_file(action.weights, section.folder)
        side = engine.side(own, asked | (action.settings or {}), f"action '{action.name}'")
        _check_shared(action.name, reference, side)
        sides[action.name] = side
    sides[FLOOR_ACTION] = Again(reference)
    tokenizer = reference.facts.tokenizer_sha256
    if tokenizer_location(section) != model_location(section):
        tokenizer = tokenizer_sha256(tokenizer_location(section), section.revision)
    return EngineModel(section.id, engine, reference, sides, tokenizer, study.law)


def _check_shared(action: str, reference: Side, side: Side) -> None:
    """Refuse a side whose tokens are not those of the reference: there is no pair.

    Raises:
        InputError: Names what they do not share.
    """
    ours, theirs = reference.facts, side.facts
    for what, one, other in (
        ("a vocabulary of", ours.vocabulary, theirs.vocabulary),
        ("the EOS tokens", ours.eos_tokens, theirs.eos_tokens),
        ("the tokenizer", ours.tokenizer_sha256, theirs.tokenizer_sha256),
    ):
        if one != other:
            raise InputError(
                f"action '{action}': its weights have {what} {_short(other)}, those of the reference {_short(one)}: "
                "sides are compared token by token, and must share the vocabulary and the tokenizer"
            )


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) else str(value)
