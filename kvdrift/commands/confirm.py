"""``kvdrift confirm``: write a study file with documents that no study has evaluated, to confirm an exploration."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvdrift import completion
from kvdrift.options import StudyStoreOption


def confirm(
    study: Annotated[
        Path,
        typer.Argument(
            metavar="STUDY.toml", help="The study file of the explored study.", autocompletion=completion.studies
        ),
    ],
    action: Annotated[
        list[str], typer.Option(metavar="NAME", help="An action to confirm; repeat the option for several.")
    ],
    store: StudyStoreOption = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file to write; by default NAME-confirm.toml."),
    ] = None,
) -> None:
    """Write a study file of actions to confirm and the baseline, on documents that no study in the store has evaluated.

    If the new study runs in the same store, its plan is prespecified.

    Examples:
        kvdrift confirm my-study.toml --action recent-quarter
    """
    from kvdrift.flows.cluster.address import default_location
    from kvdrift.flows.plan.confirmation import write_confirmation
    from kvdrift.log.store import Store
    from kvdrift.schema.study import load_studies

    opened = Store.open(store if store is not None else default_location(load_studies(study)))
    made = write_confirmation(study, action, opened, output)
    typer.echo(
        f"{made.path}: study '{made.study}' of {', '.join(made.actions)} with seed {made.seed}; none of its "
        f"{made.documents} evaluation documents was evaluated in {opened.location}"
    )
    command = f"kvdrift run {shlex.quote(str(made.path))} --store {shlex.quote(opened.location)}"
    typer.echo(f"its plan: {command} --plan-only")
