"""A program: ``kvdrift`` on a disk that fails. Arguments: the folder, how it fails, from which change, the command's."""

from __future__ import annotations

import sys
from pathlib import Path

from faults.disk.failing import How, fail

from kvdrift.command import main

if __name__ == "__main__":
    folder, how, at, *arguments = sys.argv[1:]
    fail(Path(folder), How[how], int(at))
    main(arguments)
