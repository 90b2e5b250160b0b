"""``kvdrift check``: a selector, codec or policy under the matrix that every one of the package passes."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated

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
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="selector|codec|policy",
            help="Which of them, where several have the name, as of h2o and tova a selector and a policy.",
        ),
    ] = None,
) -> None:
    """Check a selector, codec or policy on small models: what it keeps, stores or reads, and what is generated with it.

    A module is found in the working folder, or else among installed ones. Exit code 1: a check fails.
    """
    from pathlib import Path

    from generator.checks.families import checks_of, tried_of
    from generator.source_notes import source_notes

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
