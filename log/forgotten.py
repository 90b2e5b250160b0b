"""The documents that were removed from a store for good, so that no writer brings them back.

The file ``.forgotten`` in the store has a line for each document: study, model, split, stratum, and a salted SHA-256 of
the document's id. The id itself is not in the file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdrift.log.delta.durability import sync
from kvdrift.log.delta.parquet_files import replace_file
from kvdrift.schema.errors import DamagedStoreError, InputError
from kvdrift.schema.location import is_local

FORGOTTEN: Final = ".forgotten"
"""The name of the file that lists removed documents, in a store's folder."""


@dataclass(frozen=True)
class ForgottenDocuments:
    """Documents that were removed for good."""

    lines: tuple[Mapping[str, str], ...] = ()

    def of(self, study: str, model: str) -> ForgottenDocuments:
        """Return the forgotten documents of one study and model."""
        return ForgottenDocuments(
            tuple(line for line in self.lines if (line["study"], line["model"]) == (study, model))
        )

    def has(self, doc: str) -> bool:
        """Tell whether one of these documents, of any study and model, has the id ``doc``."""
        return any(_digest(line["salt"], doc) == line["sha256"] for line in self.lines)

    def count(self, split: str, stratum: str) -> int:
        """Return the number of these documents in a split and stratum."""
        return sum((line["split"], line["stratum"]) == (split, stratum) for line in self.lines)


NOTHING_FORGOTTEN = ForgottenDocuments()


def forgotten_documents(location: str) -> ForgottenDocuments:
    """Read which documents were removed from a store; none from a store behind a URL."""
    file = Path(location, FORGOTTEN)
    if not is_local(location) or not file.exists():
        return NOTHING_FORGOTTEN
    try:
        lines = tuple(json.loads(line) for line in file.read_bytes().splitlines())
        if all({"study", "model", "split", "stratum", "salt", "sha256"} <= line.keys() for line in lines):
            return ForgottenDocuments(lines)
    except (OSError, ValueError, AttributeError):
        pass
    raise DamagedStoreError(
        f"{file}: cannot be read, must have a JSON object on each line; without it removed documents could come back: "
        "restore the file from a backup"
    )


def add_forgotten(location: str, documents: Iterable[Mapping[str, Any]], doc: str) -> None:
    """Record durably that the document with the id ``doc`` is removed for good.

    ``documents`` are its rows, one for each study and model, with split and stratum; rows that are already
    recorded are not recorded again.
    """
    known = forgotten_documents(location)
    lines = [*known.lines]
    for row in documents:
        if not known.of(row["study"], row["model"]).has(doc):
            salt = secrets.token_hex(16)
            names = {name: row[name] for name in ("study", "model", "split", "stratum")}
            lines.append({**names, "salt": salt, "sha256": _digest(salt, doc)})
    replace_file(Path(location, FORGOTTEN), "".join(json.dumps(line) + "\n" for line in lines).encode())
    sync(Path(location))


def refuse_forgotten(location: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that no row, with study, model and doc, belongs to a document that was removed for good.

    Raises:
        InputError: A row belongs to such a document.
    """
    forgotten = forgotten_documents(location)
    for study, model, doc in {(row["study"], row["model"], row["doc"]) for row in rows} if forgotten.lines else ():
        if forgotten.of(study, model).has(doc):
            raise InputError(
                f"{location}: document '{doc}' of study '{study}' was removed from this store for good, and cannot "
                "come back: leave it out of the source, or give it another id"
            )


def _digest(salt: str, doc: str) -> str:
    return hashlib.sha256(f"{salt}{doc}".encode(errors="surrogatepass")).hexdigest()
