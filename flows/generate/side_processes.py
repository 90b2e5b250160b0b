"""Two side processes, for large amounts of work of a small model and for figures.

A position of a small model takes the interpreter about as long as the processor, and so does a figure: two threads of
one process get little more done than one. If a side process is killed, this process does its work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvdrift.flows.generate.local import LocalGenerator, NamedPart, named, with_actions
from kvdrift.generator.attention.threads import torch_threads
from kvdrift.generator.generation import Work, together
from kvdrift.generator.transformer.files.local_folders import model_location, stored_bytes
from kvdrift.generator.transformer.other_weights.named import weights_location, with_own_weights
from kvdrift.log.store import Unit
from kvdrift.schema.errors import KvdriftError, OperationError
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.study import FINITE_STATE, Study

Given = TypeVar("Given")
Made = TypeVar("Made")

_COUNT = 2
_MUCH = 1 << 14  # pairs times positions: some 4 s of a small model, about the time that a process takes to start
_SMALL = 100 << 20  # bytes of a small model's weights

_local: LocalGenerator | None = None  # set in a side process


class SideBySideGenerator:
    """Generation on this machine: large amounts of work of a small model in side processes, other work in this process.

    Args:
        local: Generates in this process.

    Attributes:
        sides: The side processes, each with the model; None before there are any.
    """

    def __init__(self, local: LocalGenerator) -> None:
        self._local = local
        self.sides: OwnProcesses | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in any order."""
        self.get_ready(study, work)
        pairs = self._pairs_at_once(study)
        if self.sides is None or not pairs:
            yield from self._local(study, work)
            return
        whole, here = False, partial(self._local.generate_part, study)
        there = partial(_generate, study)
        try:
            for documents in work_beside(self.sides, list(together(pairs, work, _COUNT)), there, here, named):
                yield from documents
            whole = True
        finally:
            if not whole:
                self.close()

    def get_ready(self, study: Study, work: Work) -> None:
        """Start the side processes, which take seconds to load the model, if there is much work of a small model."""
        if self.sides is None and len(os.sched_getaffinity(0)) > 1 and _is_much(work, study) and _is_small(study):
            self.sides = OwnProcesses(_COUNT, _load, study)
            for _ in range(_COUNT):
                self.sides.submit(_pairs_at_once, study)

    def close(self) -> None:
        """End the side processes, if there are any."""
        if self.sides is not None:
            self.sides.kill()
            self.sides = None

    def _pairs_at_once(self, study: Study) -> int:
        """Return how many pairs a side process decodes at once; 0 without side processes."""
        if self.sides is None:
            return 0
        try:
            return self.sides.submit(_pairs_at_once, study).result()
        except BrokenProcessPool:
            self.close()
            return 0


def work_beside(
    sides: OwnProcesses,
    parts: Sequence[Given],
    there: Callable[..., Made],
    here: Callable[[Given], Made],
    sent: Callable[[Given], object] = lambda part: part,
) -> Generator[Made, None, None]:
    """Do parts of some work in side processes, which are ended if the work ends early; yield results in any order.

    ``there`` does a part, as ``sent`` returns it, in a side process. ``here`` does a part in this process if no side
    process did: it was killed, or cannot do what this process can try.

    Raises:
        KvdriftError: A process raised it.
    """
    whole = False
    try:
        left, waiting = [], {}
        for part in parts:
            try:
                waiting[sides.submit(there, sent(part))] = part
            except BrokenProcessPool:
                left.append(part)
        for done in as_completed(waiting):
            error = done.exception()
            if isinstance(error, KvdriftError):
                raise error
            if error is None:
                yield done.result()
            else:
                left.append(waiting[done])
        yield from map(here, left)
        whole = True
    finally:
        if not whole:
            sides.kill()


def _load(study: Study) -> None:
    """Load the study's model in a side process; errors are raised later, when the model is used."""
    global _local  # noqa: PLW0603 - one to a process
    _local = LocalGenerator()
    torch_threads(1).__enter__()
    with suppress(KvdriftError):
        _local.model(study)


def _pairs_at_once(study: Study) -> int:
    return _in_this_process().model(study).pairs_at_once


def _generate(study: Study, part: NamedPart) -> list[list[Unit]]:
    """Generate a part in a side process; any failure is raised as one of our errors."""
    try:
        return _in_this_process().generate_part(study, with_actions(study, part))
    except KvdriftError:
        raise
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise OperationError(f"generation failed: {line}") from error


def _in_this_process() -> LocalGenerator:
    assert _local is not None  # noqa: S101 - loaded before any work
    return _local


def _is_much(work: Work, study: Study) -> bool:
    return sum(unit.count for _, units in work for unit in units) * study.study.horizon >= _MUCH


def _is_small(study: Study) -> bool:
    """Tell whether the model may be one that decodes in one thread, without loading the model."""
    model = study.model
    if model.kind == FINITE_STATE or model.engine is not None or model.device != "cpu":
        return False
    bytes_of = [stored_bytes(model_location(model), model.revision)]
    bytes_of += [stored_bytes(weights_location(study, action)) for action in with_own_weights(study)]
    return all(bytes_of) and sum(filter(None, bytes_of)) < _SMALL
