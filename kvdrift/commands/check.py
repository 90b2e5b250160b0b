"""``kvdrift check``: a selector under the matrix that every selector of the package passes."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift import completion
from schema.errors import InputError, OperationError

if TYPE_CHECKING:
    from generator.selectors.parameters import Value


def check(
    selector: Annotated[
        str,
        typer.Argument(
            metavar="SELECTOR",
            help="As in a study file: my_module:MySelector, or another name.",
            autocompletion=completion.selectors,
        ),
    ],
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", metavar="NAME=VALUE", help="A parameter of the selector; repeat it for several."),
    ] = None,
) -> None:
    """Check a selector on small models: what it keeps, what that depends on, and what is generated with it.

    A module is found in the working folder, or else among installed ones. Exit code 1: a check fails.
    """
    from pathlib import Path

    from generator.selector_checks.checks import CHECKS
    from generator.selector_checks.subject import Subject

    subject = Subject(selector, dict(map(_parameter, parameter or [])), Path.cwd())
    width, failed = max(len(one.name) for one in CHECKS), 0
    for one in CHECKS:
        finding = one(subject)
        failed += not finding.holds
        typer.echo(f"{'holds' if finding.holds else 'FAILS'}  {one.name:<{width}}  {one.tried}: {finding.found}")
    typer.echo(
        f"{selector}: {f'{failed} of {len(CHECKS)} checks fail' if failed else f'all {len(CHECKS)} checks hold'}"
    )
    raise typer.Exit(OperationError.exit_code if failed else 0)


def _parameter(text: str) -> tuple[str, Value]:
    """A name and its value as in a study file; a value that TOML does not know is text."""
    name, equals, written = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise InputError(f"--parameter {text}: write NAME=VALUE")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written
    if not isinstance(value, int | float | str | bool):
        raise InputError(f"--parameter {text}: the value should be a number, text, true or false")
    return name.strip(), value
