"""Steps of decoding before pairs part and after, against their bound, and against those of another commit.

The bound of a step is its least time by bytes and by products (``benchmarks.roofline``), of three actions and the
control. "before parting" decodes one replicate, whose few streams are shared as ever; "after parting" decodes K with
all streams apart. Each is measured in processes of its own, in turn with the other commit's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, model_shape
from benchmarks.roofline import Peaks, StepWork, step_work

HERE = Path(__file__).resolve().parent.parent
NAMES = ("before parting", "after parting")

# One thread's time is the process's, which other processes on the machine do not lengthen.
_DECODE = """
import json, sys, time
case, apart = json.loads(sys.argv[1])
if case["device"] == "cpu" and case["threads"] == 1:
    time.perf_counter = time.process_time
from benchmarks.generation import Case, run_shared
from kvdrift.generator.coupling.streams import Savings
savings = Savings(share_equal_histories=not apart, share_until_parting=not apart)
run = run_shared(Case(**case), savings, control=True)
print(json.dumps([run.decode_seconds, run.streams]))
"""


@dataclass(frozen=True)
class Phase:
    """The measured steps of one phase."""

    name: str  # one of ``NAMES``
    replicates: int
    steps_per_second: float  # of all pairs together
    before: float | None  # the same of the other commit, if one is measured
    streams: float  # the mean number of open streams
    bound: float  # the most steps per second
    work: StepWork  # the least work of a step

    @property
    def share(self) -> float:
        """The measured steps per second as a share of the bound."""
        return self.steps_per_second / self.bound

    def facts(self) -> dict[str, Any]:
        """The facts of the phase that its rows do not have."""
        return {"streams": round(self.streams, 1), "bound": round(self.bound, 3), **self.work.facts()}


def measure_phase(case: Case, name: str, peaks: Peaks, before: Path | None, repetitions: int) -> Phase:
    """Measure the decoding of one phase, with the code of tree ``before`` too; the fastest repetition counts."""
    case = replace(case, replicates=1 if name == NAMES[0] else case.replicates)
    seconds: dict[Path, list[float]] = {tree: [] for tree in (HERE, before) if tree is not None}
    streams = 0.0
    for _ in range(repetitions):
        for tree, own in seconds.items():
            took, streams = _decode(tree, case, apart=name == NAMES[1])
            own.append(took)
    rates = [(case.horizon - 1) / min(own) for own in seconds.values()]
    work = _work(case, streams)
    return Phase(name, case.replicates, rates[0], rates[1] if before else None, streams, 1 / work.seconds(peaks), work)


def _decode(tree: Path, case: Case, *, apart: bool) -> tuple[float, float]:
    """Return the seconds of decoding and the streams of a step, with the code of a working tree."""
    command = [sys.executable, "-c", _DECODE, json.dumps([asdict(case), apart])]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise SystemExit(f"decoding with the code of {tree} failed:\n{ended.stderr}")
    seconds, streams = json.loads(ended.stdout)
    return seconds, streams


def _work(case: Case, streams: float) -> StepWork:
    """Return the least work of a step, with so many streams and the control as a fourth action."""
    entries: Sequence[int] = [case.entries, *case.kept(), case.entries]
    actions = len(entries) - 1
    compressed = (streams - case.replicates) / actions
    each = [case.replicates] + [compressed] * actions
    return step_work(model_shape(case), entries, each, case.horizon / 2, case.replicates * actions)
