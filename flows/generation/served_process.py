"""The program of a second process: it generates what ``flows.generation`` asks, until the connection ends."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from flows.generation.local import LocalGenerator
from flows.generation.named_work import with_actions
from schema.errors import KvdriftError, OperationError


def serve(connection: Connection) -> None:
    """Generate what comes; an error is sent back as what it is."""
    local = LocalGenerator()
    while True:
        try:
            study, part = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: object = local.generate_part(study, with_actions(study, part))
        except KvdriftError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - told where it can be shown
            line = " ".join(f"{type(error).__name__}: {error}".split())
            answer = OperationError(f"generation failed: {line}")
        try:
            connection.send(answer)
        except OSError:  # nobody waits for it any more
            return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
