"""Arguments and options that several commands take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kvdrift import completion
from kvdrift.schema.errors import InputError

StoreArgument = Annotated[
    str,
    typer.Argument(metavar="STORE", help="Folder or object-store URL of a store.", autocompletion=completion.stores),
]
StudyArgument = Annotated[
    Path, typer.Argument(metavar="STUDY.toml", help="The study file.", autocompletion=completion.studies)
]
StudyOption = Annotated[
    str | None, typer.Option("--study", metavar="NAME", help="The study, if the store has several.")
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="ID", help="The model, if the study has several.")]
StudyStoreOption = Annotated[
    str | None, typer.Option("--store", metavar="DIR", help="Folder or URL of the store; by default stores/NAME.")
]
NoCompactOption = Annotated[bool, typer.Option("--no-compact", help="Do not merge small files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="File with the token that the service requires of its callers."),
]
EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        metavar="URI",
        help="grpc://HOST:PORT, or with TLS grpc+tls://HOST:PORT, of the kvdrift serve that generates.",
    ),
]
RootCertsOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-root-certs",
        metavar="FILE",
        help="PEM file of the certificate authorities to trust; by default the system's authorities.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        help="tcp://HOST:PORT of a Dask scheduler whose workers do the work; local:N starts N workers on this machine.",
    ),
]


def seconds_of(age: str, option: str) -> float:
    """Return the seconds of an age such as 90m, 12h or 7d, the value of an option."""
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", age)
    if match is None:
        raise InputError(f"{option}: '{age}' is no age, must be minutes, hours or days such as 90m, 12h or 7d")
    return int(match[1]) * {"m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]
