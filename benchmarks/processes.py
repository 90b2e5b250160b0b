"""Memory and CPU seconds of running processes, as Linux tells them in ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def resident(process: int) -> tuple[int, int]:
    """Return the resident memory of a process, and its largest so far, in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    now, most = (int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


def children(process: int) -> list[int]:
    """Return the processes that a process has started in its main thread."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process so far, including processes that it started and that have ended.

    0 if several processes are measured.
    """
    if not process:
        return 0.0
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
