"""The finite-state systems of a study, drawn or read: as documents, with their exact values.

The tables hold the distributions from which the study draws tokens. torch is needed only for sampling other than the
full softmax.

A file of systems is JSON:

    {
      "systems": {
        "coin": {
          "alphabet": 2,
          "horizon": 2,
          "eos": [],
          "reference": {"": [0.5, 0.5], "0": [0.5, 0.5], "1": [0.5, 0.5]},
          "actions": {
            "tilted": {"": [0.25, 0.75], "0": [0.5, 0.5], "1": [0.5, 0.5]}
          }
        }
      }
    }

A kernel maps histories to distributions. A history is its tokens 0..V-1 in decimal with a space between them, "" at
position 1. A kernel has all histories of 0..H-1 tokens; those that contain an EOS token may be left out, since the
distribution after it is always the point mass on the first token of "eos". Without EOS tokens, "eos" may be left out.
A distribution lists the probabilities of tokens 0..V-1.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvdrift.generator.finite.enumeration import exact_rows
from kvdrift.generator.finite.system import (
    Distributions,
    FiniteSystem,
    check_shape,
    history_of,
    mixture_system,
)
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.errors import InputError, nearest, reading
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.study import FINITE_STATE, DocumentsSection, Study

Strata = dict[str, dict[str, list[FiniteSystem]]]
"""Systems by split and stratum."""


def file_systems(study: Study) -> list[FiniteSystem] | None:
    """Read all systems of the study's file, with the study's sampling applied; None if the study draws its systems."""
    file = study.model.tables_file
    return None if file is None else [_deployed(system, study.sampling) for system in read_system_file(file).values()]


def study_systems(study: Study, read: Iterable[FiniteSystem] | None = None) -> Strata:
    """Draw the systems of a finite-state study, or take them from ``read``, which has all systems of the study's file.

    Drawn systems are named ``system-1`` to ``system-N`` in the evaluation split and ``development-1`` to
    ``development-N`` in the development split, with the stratum's name in front if there are several strata. A file's
    systems are taken in its order, stratum by stratum, and within a stratum development first.
    """
    model = study.model
    read = file_systems(study) if read is None else read
    stored = None if read is None else _stored(study, read)
    strata: Strata = {split: {} for split in SPLITS}
    for section in study.documents:
        for split, count in (("development", section.development), ("evaluation", section.evaluation)):
            systems = _drawn(study, section, split, count) if stored is None else list(islice(stored, count))
            if len(systems) < count:
                raise InputError(
                    f"documents '{section.stratum_name}': {split} = {count}, but only {len(systems)} "
                    f"system(s) of {model.tables} are left for it"
                )
            strata[split][section.stratum_name] = systems
    return strata


def system_document(system: FiniteSystem, stratum: str) -> Document:
    """Return the document that stands for a system: its prompt has no tokens."""
    return Document(system.name, stratum, system.name, FINITE_STATE, FINITE_STATE, ())


def exact_value_rows(
    study: str, model: str, system: FiniteSystem, revisions: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of table ``exact_values`` for every action of a system.

    ``revisions`` are the actions' revisions by name; an action without one has revision 0.
    """
    named = {"study": study, "model": model, "doc": system.name}
    return [
        {**named, "action": action, "action_revision": (revisions or {}).get(action, 0), **row}
        for action in system.actions
        for row in exact_rows(system, action)
    ]


def _drawn(study: Study, section: DocumentsSection, split: str, count: int) -> list[FiniteSystem]:
    kind = "system" if split == "evaluation" else split
    prefix = f"{section.stratum_name}-{kind}" if len(study.documents) > 1 else kind
    drawn = [
        mixture_system(
            study.study.seed, f"{prefix}-{number}", number, count, study.model.alphabet or 2, study.study.horizon,
            [action.name for action in study.actions],
        )
        for number in range(1, count + 1)
    ]  # fmt: skip
    return [_deployed(system, study.sampling) for system in drawn]


def _deployed(system: FiniteSystem, sampling: Sampling) -> FiniteSystem:
    """Return the system with tables of its distributions under ``sampling``, from which tokens are drawn."""
    if sampling == FULL_SOFTMAX:
        return system
    from kvdrift.generator.coupling.sampling import deployed_table  # noqa: PLC0415 - torch is not loaded for the full softmax

    return replace(
        system,
        reference=tuple(deployed_table(table, sampling) for table in system.reference),
        actions={
            name: tuple(deployed_table(table, sampling) for table in distributions)
            for name, distributions in system.actions.items()
        },
    )


def _stored(study: Study, read: Iterable[FiniteSystem]) -> Iterator[FiniteSystem]:
    """Yield the file's systems in order, cut to the study's actions and horizon."""
    names, horizon = [action.name for action in study.actions], study.study.horizon
    path = study.model.tables_file
    for system in read:
        if system.horizon < horizon:
            raise InputError(
                f"{path}: system '{system.name}' ends at position {system.horizon}, before study.horizon = {horizon}"
            )
        yield replace(
            system,
            horizon=horizon,
            reference=system.reference[:horizon],
            actions={name: system.distributions(name)[:horizon] for name in names},
        )


_Kernel = dict[str, list[float]]


class _SystemOfFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    alphabet: int
    horizon: int
    eos: list[int] = []
    reference: _Kernel
    actions: dict[str, _Kernel]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    systems: dict[str, _SystemOfFile] = Field(min_length=1)


def read_system_file(path: Path) -> dict[str, FiniteSystem]:
    """Read the systems of a file, by name and in the file's order."""
    try:
        with reading("cannot be read as JSON"):
            content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unrepeated)
        return {name: _system(name, system) for name, system in _File.model_validate(content).systems.items()}
    except ValidationError as error:
        raise InputError(f"{path}: {_explained(error)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _explained(error: ValidationError) -> str:
    """Return what is wrong, as in ``/systems/coin/horizon = '2': Input should be a valid integer``."""
    problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # its right name is missing, too
    where = "".join(f"/{part}" for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key; {nearest(str(problem['loc'][-1]), _SystemOfFile.model_fields)}"
    return f"{where} = {reprlib.repr(problem['input'])}: {problem['msg']}"


def _system(name: str, content: _SystemOfFile) -> FiniteSystem:
    eos_tokens = tuple(content.eos)
    check_shape(name, content.alphabet, content.horizon, eos_tokens)

    def distributions(where: str, kernel: _Kernel) -> Distributions:
        return _distributions(f"system '{name}', {where}", kernel, content.alphabet, content.horizon, eos_tokens)

    actions = {action: distributions(f"action '{action}'", kernel) for action, kernel in content.actions.items()}
    reference = distributions("reference", content.reference)
    return FiniteSystem(name, content.alphabet, content.horizon, reference, actions, eos_tokens)


def _distributions(
    where: str, kernel: _Kernel, alphabet: int, horizon: int, eos_tokens: tuple[int, ...]
) -> Distributions:
    distributions = []
    for t in range(horizon):
        table = np.empty((alphabet**t, alphabet))
        for code in range(alphabet**t):
            history = history_of(code, t, alphabet)
            place = f"{where}, position {t + 1}, history {list(history)}"
            key = " ".join(map(str, history))
            if key in kernel:
                if len(probabilities := kernel.pop(key)) != alphabet:
                    raise InputError(f"{place}: has {len(probabilities)} probabilities, not {alphabet}")
                table[code] = probabilities
            elif any(token in eos_tokens for token in history):
                table[code] = np.arange(alphabet) == eos_tokens[0]
            else:
                raise InputError(f'{place}: no distribution; a kernel needs one for every history, here under "{key}"')
        distributions.append(table)
    for key in kernel:
        raise InputError(
            f'{where}: "{key}" is not a history of at most {horizon - 1} tokens 0..{alphabet - 1} with spaces between'
        )
    return tuple(distributions)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise InputError(f"'{name}' is given twice in one object")
        values[name] = value
    return values
