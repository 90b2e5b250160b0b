"""A program: ``kvdrift`` on a disk that fails, or while the clock goes back.

Arguments: the folder, how it fails, from which change, and those of the command. If the clock goes back, it is by so
many seconds at once, instead of a change's number, and by a millisecond at each look from then on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from faults.disk.failing import How, fail, set_clock

from kvdrift.command import main

CLOCK = "CLOCK"

if __name__ == "__main__":
    folder, how, at, *arguments = sys.argv[1:]
    if how == CLOCK:
        set_clock(-float(at), back=0.001)
    else:
        fail(Path(folder), How[how], int(at))
    main(arguments)
