"""The program of a second process: it does what ``flows.generation.second_process`` asks, until the connection ends."""

from __future__ import annotations

import gc
import sys
from multiprocessing.connection import Connection

from flows.generation.local import LocalGenerator
from flows.generation.named_work import NamedPart, with_actions
from schema.errors import KvdriftError, OperationError
from schema.store.store import Unit
from schema.study import Study


def serve(connection: Connection) -> None:
    """Generate what comes, a study with a part of its work, or call it; an error is sent back as what it is."""
    local = LocalGenerator()
    while True:
        try:
            asked = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: object = asked() if callable(asked) else _generate(local, *asked)
        except KvdriftError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - told where it can be shown
            line = " ".join(f"{type(error).__name__}: {error}".split())
            answer = RuntimeError(line) if callable(asked) else OperationError(f"generation failed: {line}")
        try:
            connection.send(answer)
        except OSError:  # nobody waits for it any more
            return


def _generate(local: LocalGenerator, study: Study, part: NamedPart) -> list[list[Unit]]:
    return local.generate_part(study, with_actions(study, part))


if __name__ == "__main__":
    gc.set_threshold(10_000, *gc.get_threshold()[1:])  # as kvdrift.program
    serve(Connection(int(sys.argv[1])))
