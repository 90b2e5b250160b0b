"""A program: ``kvdrift`` on a disk that fails, or while the clock goes back.

Its arguments are the folder, the way to fail, the number of the first failing change, and the arguments of the command.
For the clock, that number is the seconds by which the clock is set back; each later reading sets it back by 1 ms more.
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
