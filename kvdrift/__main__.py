"""``python -m kvdrift`` is the ``kvdrift`` command."""

from kvdrift.program import program

program()
