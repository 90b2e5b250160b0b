"""A selector, codec or policy that is tried, and the checks that all three kinds have in common.

Decisions are compared with those of a second interpreter, which finds decisions that depend on the process. It has
another hash seed, an empty working folder, and only the environment variables in ``KEPT``: those that say where
programs, libraries and modules are, and how numbers are rounded. Its torch has the same number of threads. So a part
that takes anything from outside its source, its parameters and the prompt will probably decide differently there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch

from kvdrift.generator.actions import Action
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.identity import parts_sha256
from kvdrift.generator.selectors import Full
from kvdrift.generator.selectors.custom.parts import PartKind
from kvdrift.generator.selectors.parameters import Value
from kvdrift.generator.transformer.loading import LoadedModel
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, failure_of, first_line
from kvdrift.schema.own_process import last_words, own_environment

KEPT = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "TMPDIR",
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables that the second interpreter gets, if they are set, besides PYTHONPATH and the hash seed."""

FIRST, ALONE = "first", "alone"
"""The names of two prompts of equal length, which no other check uses."""

_SECOND = "kvdrift.generator.checks.kinds"  # the module that the second interpreter runs

Part = TypeVar("Part")
Decisions = Mapping[str, str]
"""Digests of a part's decisions by the tried input; the key of the decision on prompt ``ALONE`` is ``ALONE``."""


class Finding(NamedTuple):
    """The outcome of a check, None if it cannot be made, and a line about it."""

    holds: bool | None
    line: str


class Unknown(str):
    """The line of a check that cannot be made: what is not reported, and what follows."""

    __slots__ = ()


class Tried(Protocol):
    """What is checked."""

    @property
    def part(self) -> Any:
        """The part, or an engine's side."""


@dataclass(frozen=True)
class Check:
    """A check that every part of a kind, or every side of an engine, must pass: its name, and what it tries.

    ``function`` tries the part; it returns a line about the result, or raises an error that names the fault.
    """

    name: str
    tried: str
    function: Callable[[Any], str]

    def __call__(self, trial: Tried) -> Finding:
        """Run the check; an exception of the part becomes a finding."""
        try:
            line = self.function(trial)
            return Finding(holds=None if isinstance(line, Unknown) else True, line=line)
        except KvdriftError as error:
            return Finding(holds=False, line=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the part's code raises
            return Finding(holds=False, line=failure_of(error, trial.part))


def require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as assert takes it
    """Raise an error with the message ``otherwise`` unless ``holds``."""
    if not holds:
        raise OperationError(otherwise)


@dataclass(frozen=True, eq=False)
class Trial(ABC, Generic[Part]):
    """A part of an action that is to be checked.

    ``name`` is its name in a study file, ``parameters`` are those that differ from the defaults. Modules are found in
    ``folder``, if any, before installed modules. ``elsewhere`` is empty until ``decide_elsewhere`` appends the
    outcome in a second interpreter.
    """

    name: str
    parameters: Mapping[str, Value] = field(default_factory=dict)
    folder: Path | None = None
    part: Part = field(init=False)
    elsewhere: list[Decisions | str] = field(init=False, default_factory=list)

    kind: ClassVar[PartKind[Any]]
    decides: ClassVar[str]  # the noun of its decisions, in the plural
    checks: ClassVar[tuple[Check, ...]]

    def __post_init__(self) -> None:
        try:
            action = self.action()
        except InputError as error:  # the user did not name the checks' action
            raise InputError(str(error).removeprefix("action 'own': ")) from error.__cause__
        object.__setattr__(self, "part", getattr(action, self.kind.noun))

    @property
    def options(self) -> dict[str, Any]:
        """The part's parameters that a study can set, with their values."""
        part: Any = self.part
        options: dict[str, Any] = part.parameters
        return options

    @abstractmethod
    def action(self, name: str = "own", **changes: Any) -> Action:
        """Return an action called ``name`` with the part; ``changes`` are new values of the part's parameters."""

    @abstractmethod
    def decided(self) -> dict[str, str]:
        """Return a digest of the part's decision on each input of the other checks, keyed by a name of the input."""

    @abstractmethod
    def decided_on(self, prompt: str) -> str:
        """Return a digest of the part's decision on the prompt named ``prompt``; all such prompts have equal length."""


# --- Another process -------------------------------------------------------------------------------------------------


def decide_elsewhere(trials: Sequence[Trial[Any]]) -> None:
    """Try all parts in one second interpreter, one after the other; append each outcome to its trial's ``elsewhere``.

    The outcome is the part's decisions, or a line about a failure.
    """
    requested = [
        {"kind": trial.kind.noun, "name": trial.name, "parameters": dict(trial.parameters),
         "folder": None if trial.folder is None else str(trial.folder.absolute())}
        for trial in trials
    ]  # fmt: skip
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment["PYTHONPATH"] = own_environment()["PYTHONPATH"]
    environment["PYTHONHASHSEED"] = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with TemporaryDirectory(prefix="kvdrift-") as folder:
        results, working = Path(folder, "decided.json"), Path(folder, "empty")
        working.mkdir()
        done = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            [sys.executable, "-m", _SECOND, results, str(torch.get_num_threads())],
            input=json.dumps(requested), cwd=working, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        failed = [last_words(done.stderr, done.returncode)] * len(trials)
        answers = json.loads(results.read_text("utf-8")) if results.is_file() else failed
    for trial, answer in zip(trials, answers, strict=True):
        trial.elsewhere.append(answer)


def decisions_of(make: Callable[[], Trial[Any]]) -> Decisions | str:
    """Make a trial and return its part's decisions, first that on prompt ``ALONE``; or a line about a failure."""
    try:
        trial = make()
        return {ALONE: trial.decided_on(ALONE), **trial.decided()}
    except KvdriftError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever the part's code raises
        return f"{type(error).__name__}: {first_line(error)}"


def same_elsewhere(trial: Trial[Any]) -> str:
    """Check that a part's decisions are equal in an interpreter with another hash seed, folder and environment."""
    there = _elsewhere(trial)
    for where, digest in trial.decided().items():
        others = f"{where}: {trial.decides} differ in a process with another hash seed, working folder and environment"
        require(there[where] == digest, others)
    return f"the same {trial.decides}"


def same_after_others(trial: Trial[Any]) -> str:
    """Check that a part's decision on a prompt does not depend on earlier prompts."""
    first, other, again = (trial.decided_on(prompt) for prompt in (FIRST, ALONE, FIRST))
    changed = f"{trial.decides} of an input change after another input of its size; keep no state between inputs"
    require(first == again, changed)
    require(other == _elsewhere(trial)[ALONE], changed)
    return f"the same {trial.decides}"


def _elsewhere(trial: Trial[Any]) -> Decisions:
    if not trial.elsewhere:
        decide_elsewhere([trial])
    (decided,) = trial.elsewhere
    if isinstance(decided, str):
        raise OperationError(f"the checks fail in a second interpreter: {decided}")
    return decided


# --- Identity, and events --------------------------------------------------------------------------------------------


def in_identity(trial: Trial[Any]) -> str:
    """Check that a part and each of its parameters belong to the identity of its action."""
    first, twin = trial.action(), trial.action()
    require(
        first == twin and hash(first.parts) == hash(twin.parts),
        f"{trial.kind.plural} with equal parameters, or their hashes, are unequal; make the class a frozen dataclass",
    )
    columns = "identity() has other columns than Selector.identity(); it must have exactly the same"
    require(first.selector.identity().keys() == Full().identity().keys(), columns)
    rows, hashes, changed, skipped = {_row(first)}, {parts_sha256(first.parts)}, list[str](), list[str]()
    for name, value in trial.options.items():
        if (action := _changed(trial, name, value)) is None:
            skipped.append(name)
            continue
        changed.append(name)
        rows.add(_row(action))
        hashes.add(parts_sha256(action.parts))
        collided = min(len(rows), len(hashes)) <= len(changed)
        line = f"parameter {name} is no part of the identity: two of its values give the same row or hash"
        require(not collided, f"{line}; keep it among what identity() or parameters returns")
    left = f"; no other value tried of {', '.join(skipped)}" if skipped else ""
    return f"{', '.join(changed) or 'no parameter'}{left}"


def _row(action: Action) -> str:
    return json.dumps(action.row("study", prespecified=True))


def _changed(trial: Trial[Any], name: str, value: Any) -> Action | None:
    """Return an action whose parameter ``name`` has another value; None if the part accepts no value that is tried."""
    choices: Mapping[str, tuple[Any, ...]] = getattr(trial.part, "choices", {})
    others = (choice for choice in choices[name] if choice != value) if name in choices else _other_values(value)
    for other in others:
        try:
            return trial.action(**{name: other})
        except KvdriftError:
            continue
    return None


def _other_values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif value is None:
        yield 2
    elif isinstance(value, int | float):
        yield from (value + 2, value + 1, value - 1)
        if isinstance(value, float):
            yield from (value / 2, value + 0.125)


def same_events(action: Action, beside: Action, model: LoadedModel, document: Document) -> str:
    """Check that an action has the same events alone, beside another action, and replicate by replicate."""

    def events(*pending: PendingUnit) -> list[dict[str, Any]]:
        units: list[Unit] = generate_units(model, "study", document, list(pending), 8, 7)
        return [row for unit in units for row in unit.events.to_pylist() if row["action"] == action.name]

    alone = events(PendingUnit(action, 0, 2))
    parts = events(PendingUnit(beside, 0, 2), PendingUnit(action, 0, 1)) + events(PendingUnit(action, 1, 1))
    require(alone == parts, "an action has other events beside another one, or replicate by replicate, than alone")
    differ, most = sum(row["x_token"] != row["y_token"] for row in alone), max(row["delta"] for row in alone)
    return (
        "the same events alone, beside another action and in parts; "
        f"{differ} of {len(alone)} tokens differ from X, delta up to {most:.2f}"
    )


def require_no_draws(state: torch.Tensor) -> None:
    """Raise an error unless torch's random state is still ``state``."""
    line = "random numbers are drawn from torch's global state; draw them from a torch.Generator with a seed"
    require(torch.equal(torch.get_rng_state(), state), line)


def common_checks(others: str) -> tuple[Check, ...]:
    """Return the checks of all three kinds of parts; their lines call a part's inputs ``others``, such as "prompts"."""
    return (
        Check(f"other {others}", f"two {others} of one size in turn, one of them alone in another process",
              same_after_others),
        Check("another process", "another hash seed, working folder and environment", same_elsewhere),
        Check("identity", "each parameter changed", in_identity),
    )  # fmt: skip
