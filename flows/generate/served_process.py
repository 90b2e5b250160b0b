"""The program of the side processes: each does what is asked of it, until the connection ends.

The first thing that is asked is a study, whose model is loaded. Then the process forks: loading takes longer than all
else that a side process begins with.
"""

from __future__ import annotations

import gc
import os
import sys
from multiprocessing.connection import Connection

from flows.generate.local import LocalGenerator
from flows.generate.named_work import NamedPart, with_actions
from generator.transformer.decoder import torch_threads
from log.store import Unit
from schema.errors import KvdriftError, OperationError
from schema.study import Study


def serve(first: Connection, second: Connection) -> None:
    """Do what is asked of both side processes, this one and a fork of it."""
    local = LocalGenerator()
    with torch_threads(1):  # what is forked from a process with threads may hang
        if not _answer(first, local):
            return
        own, other = (second, first) if os.fork() == 0 else (first, second)
        other.close()
        while _answer(own, local):
            pass


def _answer(connection: Connection, local: LocalGenerator) -> bool:
    """Do the next thing: load a study's model, generate a part of its work, or call a function.

    An error is sent back as what it is. Returns whether the connection goes on.
    """
    try:
        asked = connection.recv()
    except (EOFError, OSError):
        return False
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
        return False
    return True


def _generate(local: LocalGenerator, study: Study, part: NamedPart | None = None) -> list[list[Unit]] | int:
    """Generate the part or, without one, load the study's model and say how many pairs it decodes at once."""
    if part is None:
        return local.model(study).pairs_at_once
    return local.generate_part(study, with_actions(study, part))


if __name__ == "__main__":
    gc.set_threshold(10_000, *gc.get_threshold()[1:])  # as kvdrift.program
    serve(*(Connection(int(number)) for number in sys.argv[1:]))
