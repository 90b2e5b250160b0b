"""What a selector, codec or policy decides in a second interpreter.

That interpreter has another hash seed, a working folder of its own, which is empty, and of the environment only the
variables of ``KEPT``: where programs, libraries and modules are found, and what decides how numbers are rounded. Its
torch has as many threads. So whatever a part takes from elsewhere than its source, its parameters and the prompt is
likely to differ there.
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

from generator.checks.check import require
from generator.checks.tried import ALONE, FIRST, Tried
from schema.errors import KvdriftError, first_line
from schema.own_process import last_words, own_environment

KEPT = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "TMPDIR",
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip
"""Variables of the environment that the second interpreter has, if they are set, beside PYTHONPATH and hash seed."""

ELSEWHERE = "another hash seed, working folder and environment"
IN_TURN = "two prompts of one length in turn, one of them alone in another process"


@dataclass(frozen=True)
class Decided:
    """Digests of what a part has decided.

    Attributes:
        alone: Of prompt ``ALONE``, before the part has met any other.
        usual: Of the prompts that checks use, by what was tried.
        failed: What failed instead, in a line; empty if nothing did.
    """

    alone: str = ""
    usual: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""

    @classmethod
    def here(cls, make: Callable[[], Tried[Any]]) -> Self:
        """What the part that ``make`` returns decides in this interpreter, first of prompt ``ALONE``."""
        try:
            part = make()
            return cls(part.decided_of(ALONE), part.decided())
        except KvdriftError as error:
            return cls(failed=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the part's code raises
            return cls(failed=f"{type(error).__name__}: {first_line(error)}")


def decided_elsewhere(subjects: Sequence[Tried[Any]]) -> list[Decided]:
    """Return what parts decide in one second interpreter, in which they are tried one after the other."""
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
            [sys.executable, "-m", "generator.checks.families", results, str(torch.get_num_threads())],
            input=json.dumps(asked), cwd=working, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if not results.is_file():
            return [Decided(failed=last_words(done.stderr, done.returncode))] * len(subjects)
        return [Decided(**one) for one in json.loads(results.read_text("utf-8"))]


def same_elsewhere(subject: Tried[Any]) -> str:
    """Check that a part decides in a second interpreter what it decides here; return what was found."""
    here, there = subject.decided(), _elsewhere(subject).usual
    for where, digest in here.items():
        require(
            there[where] == digest,
            f"{where}: {subject.decides} are others with another hash seed, working folder and environment",
        )
    return f"the same {subject.decides}"


def same_after_others(subject: Tried[Any]) -> str:
    """Check that what a part decides of a prompt does not depend on the prompts before it; return what was found."""
    first, other, again = (subject.decided_of(prompt) for prompt in (FIRST, ALONE, FIRST))
    require(first == again, f"{subject.decides} of a prompt are others after another prompt of its length")
    require(
        other == _elsewhere(subject).alone,
        f"{subject.decides} of a prompt are others after another prompt of its length than alone",
    )
    return f"the same {subject.decides}"


def _elsewhere(subject: Tried[Any]) -> Decided:
    """What a part decides in a second interpreter, which is started once."""
    if not subject.found_elsewhere:
        subject.found_elsewhere.extend(decided_elsewhere([subject]))
    found: Decided = subject.found_elsewhere[0]
    require(not found.failed, f"in a second interpreter: {found.failed}")
    return found
