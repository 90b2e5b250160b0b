"""``kvdrift check``: a selector, codec or policy under the matrix that every one of the package passes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvdrift import completion
from schema.errors import InputError, OperationError

if TYPE_CHECKING:
    from generator.selectors.parameters import Value


def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A selector, codec or policy as in a study file: my_module:MySelector, or another name.",
            autocompletion=completion.checked,
        ),
    ],
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", metavar="NAME=VALUE", help="A parameter of it; repeat it for several."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="Of an engine, such as llama.cpp: its weights.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="selector|codec|policy",
            help="Which of them, where several have the name, as of h2o and tova a selector and a policy.",
        ),
    ] = None,
) -> None:
    """Check a selector, codec or policy on small models: what it keeps, stores or reads, and what is generated with it.

    The name of an engine, such as llama.cpp, checks its adapter.

    A module is found in the working folder, or else among installed ones. Exit code 1: a check fails.
    """
    from generator.generation.engine_models import ENGINES

    if name in ENGINES:
        _check_engine(name, weights)
    from generator.checks.families import checks_of, tried_of
    from generator.checks.source_notes import source_notes

    tried = tried_of(name, dict(map(_parameter, parameter or [])), Path.cwd(), kind)
    checks = checks_of(tried)
    width, failed = max(len(one.name) for one in checks), 0
    for one in checks:
        finding = one(tried)
        failed += not finding.holds
        typer.echo(f"{'holds' if finding.holds else 'FAILS'}  {one.name:<{width}}  {one.tried}: {finding.found}")
    for note in source_notes(type(tried.part)):
        typer.echo(f"note   {note}")
    typer.echo(f"{name}: {f'{failed} of {len(checks)} checks fail' if failed else f'all {len(checks)} checks hold'}")
    raise typer.Exit(OperationError.exit_code if failed else 0)


def _check_engine(name: str, weights: Path | None) -> NoReturn:
    """Try what an engine's adapter must hold, and end with the exit code."""
    from generator.engines.promises import PROMISES
    from generator.generation.engine_models import ENGINES
    from generator.transformer.local_folders import EMBEDDED_GGUF

    engine, file = ENGINES[name](), EMBEDDED_GGUF / "tiny-F32.gguf" if weights is None else weights
    width, failed = max(len(one.name) for one in PROMISES), 0
    for one in PROMISES:
        try:
            holds, found = True, one.function(engine, file)
        except OperationError as error:
            holds, found = False, str(error)
        failed += not holds
        typer.echo(f"{'holds' if holds else 'FAILS'}  {one.name:<{width}}  {one.tried}: {found}")
    typer.echo(
        f"{name}: {f'{failed} of {len(PROMISES)} checks fail' if failed else f'all {len(PROMISES)} checks hold'}"
    )
    raise typer.Exit(OperationError.exit_code if failed else 0)


def _parameter(text: str) -> tuple[str, Value]:
    """A name and its value as in a study file; a value that TOML does not know is text."""
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
