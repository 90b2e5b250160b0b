"""``python -m kvdrift`` is the ``kvdrift`` command."""

from kvdrift.command import main

main()
