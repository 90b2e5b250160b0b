"""``kvdrift check``: check a selector, codec, policy, engine, press, cache or patch; kvdrift's own pass all checks."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvdrift import completion
from kvdrift.schema.errors import InputError, OperationError

if TYPE_CHECKING:
    from kvdrift.generator.checks.trial import Check, Tried
    from kvdrift.generator.selectors.parameters import Value


def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A selector, codec or policy as named in a study file, such as my_module:MySelector; a press, cache "
            "or patch; an engine; or a study file with an engine.",
            autocompletion=completion.checked,
        ),
    ],
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A parameter of the selector, codec or policy; repeat the option for several."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The weights on which an engine, press, cache or patch is checked."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="selector|codec|policy|patch",
            help="The kind to check, if the name has several: h2o and tova are both a selector and a policy; patch for "
            "a function of the model.",
        ),
    ] = None,
) -> None:
    """Check a selector, codec or policy on small models: its kept entries, its storage, and its events.

    A press of kvpress, a cache of transformers or of your own, and a patch (--kind patch) are tried on the embedded
    model or on the weights that you name.

    The name of an engine, such as llama.cpp, checks the engine's adapter. A study file with an engine checks its
    servers or weights.

    A module is found in the working folder, or else among installed modules. Exit code 1: a check fails.

    Examples:
        kvdrift check snapkv
        kvdrift check my_module:MySelector --parameter sign=-1
        kvdrift check h2o --kind policy
        kvdrift check "AdaKVPress(SnapKVPress(compression_ratio=0.5))"
        kvdrift check my_module:my_patch --kind patch
        kvdrift check llama.cpp --weights model.gguf
        kvdrift check servers.toml
    """
    from kvdrift.generator.engines.registry import ENGINES

    if name in ENGINES:
        _check_engine(name, None if weights is None else str(weights), None)
    if name.endswith(".toml"):
        _check_study(Path(name))
    if kind == "patch" or "(" in name or name[:1].isupper():
        _check_setting(name, kind, None if weights is None else str(weights))
    from kvdrift.generator.checks.kinds import trial_of
    from kvdrift.generator.checks.source_notes import source_notes

    trial = trial_of(name, dict(map(_parameter, parameter or [])), Path.cwd(), kind)
    holds = _run(trial.checks, trial)
    for note in source_notes(type(trial.part)):
        typer.echo(f"note   {note}")
    _end(name, holds)


def _check_engine(name: str, weights: str | None, folder: Path | None) -> NoReturn:
    """Check an engine's adapter on weights, by default the engine's sample, and exit.

    ``weights`` are named as in a study file that lies in ``folder``.
    """
    from kvdrift.generator.checks.sides import ADAPTER_CHECKS, SideTrial
    from kvdrift.generator.engines.registry import engine_of

    engine = engine_of(name)
    written = weights or engine.sample
    if written is None:
        raise InputError(f"engine {name}: its check needs weights; add --weights FILE")
    _end(name, _run(ADAPTER_CHECKS, SideTrial.of(engine, engine.location(written, folder, "weights = "))))


def _check_setting(text: str, kind: str | None, weights: str | None) -> NoReturn:
    """Check a press, cache or patch by the checks of an engine's adapter, say what it does to a cache, and exit."""
    from kvdrift.generator.checks.sides import ADAPTER_CHECKS, SideTrial
    from kvdrift.generator.checks.trial import Check
    from kvdrift.generator.engines.transformers.checks import Trying

    engine = Trying(text, kind, Path.cwd())
    location = engine.location(weights or engine.sample, Path.cwd(), "weights = ")
    doing = Check("effect", "a prompt of 320 tokens, beside the whole cache", lambda _: engine.effect(location))
    _end(text, _run((*ADAPTER_CHECKS, doing), SideTrial.of(engine, location)))


def _check_study(path: Path) -> NoReturn:
    """Check the servers of a study file, or the engine's adapter with the file's weights, and exit."""
    from kvdrift.generator.checks.sides import SERVER_CHECKS, SideTrial
    from kvdrift.generator.engines.http.engine import ServerSide
    from kvdrift.generator.engines.registry import engine_model
    from kvdrift.schema.study import FLOOR_ACTION, HTTP, load_studies

    study = load_studies(path)[0]
    if study.model.engine is None:
        raise InputError(f"{path}: has no engine to check; name a selector, codec or policy of the study")
    if study.model.engine != HTTP:
        _check_engine(study.model.engine, study.model.id, study.model.folder)
    model, holds = engine_model(study), list[bool | None]()
    for name, side in {"reference": model.reference, **model.sides}.items():
        if isinstance(side, ServerSide) and name != FLOOR_ACTION:
            typer.echo(f"{name} at {side.connection.url}")
            holds += _run(SERVER_CHECKS, SideTrial(side))
    _end(str(path), holds)


def _run(checks: Sequence[Check], tried: Tried) -> list[bool | None]:
    """Print a line for each check, and return whether they hold; None if it is unknown."""
    holds, width = [], max(len(one.name) for one in checks)
    for one in checks:
        found = one(tried)
        verdict = {True: "holds", False: "FAILS", None: "?    "}[found.holds]
        unknown = "unknown: " if found.holds is None else ""
        typer.echo(f"{verdict}  {one.name:<{width}}  {one.tried}: {unknown}{found.line}")
        holds.append(found.holds)
    return holds


def _end(name: str, holds: Sequence[bool | None]) -> NoReturn:
    failed, unknown, tried = holds.count(False), holds.count(None), len(holds) - holds.count(None)
    result = f"{failed} of {tried} checks fail" if failed else f"all {tried} checks hold"
    typer.echo(f"{name}: {result}{f'; {unknown} could not be tried' if unknown else ''}")
    raise typer.Exit(OperationError.exit_code if failed else 0)


def _parameter(text: str) -> tuple[str, Value]:
    """Return the name and the value of ``NAME=VALUE``; a value that is not TOML is text."""
    name, equals, written = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise InputError(f"--parameter {text}: write NAME=VALUE")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError):
        value = written
    if not isinstance(value, int | float | str | bool):
        raise InputError(f"--parameter {text}: the value should be a number, text, true or false")
    return name.strip(), value
