"""Run a selector, codec or policy in a second interpreter, to find decisions that depend on the process.

That interpreter has another hash seed, an empty working folder, and only the environment variables in ``KEPT``: those
that say where programs, libraries and modules are, and how numbers are rounded. Its torch has the same number of
threads. So a part that takes anything from outside its source, its parameters and the prompt will probably decide
differently there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch

from kvdrift.generator.checks.tried import ALONE, FIRST, Tried, require
from kvdrift.schema.errors import KvdriftError, first_line
from kvdrift.schema.own_process import last_words, own_environment

KEPT = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "TMPDIR",
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables that the second interpreter gets, if they are set, besides PYTHONPATH and the hash seed."""

ELSEWHERE = "another hash seed, working folder and environment"
IN_TURN = "two prompts of one length in turn, one of them alone in another process"


@dataclass(frozen=True)
class Decided:
    """Digests of a part's decisions.

    Attributes:
        alone: The decision on prompt ``ALONE``, before the part has met any other prompt.
        usual: The decisions on the prompts of the checks, by what was tried.
        failed: A line about a failure; empty if nothing failed.
    """

    alone: str = ""
    usual: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""

    @classmethod
    def here(cls, make: Callable[[], Tried[Any]]) -> Self:
        """Return the decisions in this interpreter of the part that ``make`` returns, first on prompt ``ALONE``."""
        try:
            part = make()
            return cls(part.decided_of(ALONE), part.decided())
        except KvdriftError as error:
            return cls(failed=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the part's code raises
            return cls(failed=f"{type(error).__name__}: {first_line(error)}")


def decided_elsewhere(subjects: Sequence[Tried[Any]]) -> list[Decided]:
    """Return the decisions of parts in one second interpreter, in which they are tried one after the other."""
    asked = [
        {"kind": one.kind, "name": one.name, "parameters": dict(one.parameters),
         "folder": None if one.folder is None else str(one.folder.absolute())}
        for one in subjects
    ]  # fmt: skip
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment["PYTHONPATH"] = own_environment()["PYTHONPATH"]
    environment["PYTHONHASHSEED"] = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with TemporaryDirectory(prefix="kvdrift-") as folder:
        results, working = Path(folder, "decided.json"), Path(folder, "empty")
        working.mkdir()
        done = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            [sys.executable, "-m", "kvdrift.generator.checks.families", results, str(torch.get_num_threads())],
            input=json.dumps(asked), cwd=working, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if not results.is_file():
            return [Decided(failed=last_words(done.stderr, done.returncode))] * len(subjects)
        return [Decided(**one) for one in json.loads(results.read_text("utf-8"))]


def same_elsewhere(subject: Tried[Any]) -> str:
    """Check that a part decides in a second interpreter as here; return a line about the result."""
    here, there = subject.decided(), _elsewhere(subject).usual
    for where, digest in here.items():
        require(
            there[where] == digest,
            f"{where}: {subject.decides} are others with another hash seed, working folder and environment",
        )
    return f"the same {subject.decides}"


def same_after_others(subject: Tried[Any]) -> str:
    """Check that a part's decision on a prompt does not depend on earlier prompts; return a line about the result."""
    first, other, again = (subject.decided_of(prompt) for prompt in (FIRST, ALONE, FIRST))
    require(first == again, f"{subject.decides} of a prompt are others after another prompt of its length")
    require(
        other == _elsewhere(subject).alone,
        f"{subject.decides} of a prompt are others after another prompt of its length than alone",
    )
    return f"the same {subject.decides}"


def _elsewhere(subject: Tried[Any]) -> Decided:
    """Return a part's decisions in a second interpreter, which is started once."""
    if not subject.found_elsewhere:
        subject.found_elsewhere.extend(decided_elsewhere([subject]))
    found: Decided = subject.found_elsewhere[0]
    require(not found.failed, f"in a second interpreter: {found.failed}")
    return found
