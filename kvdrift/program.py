"""The ``kvdrift`` command as a program of its own: how its process collects its objects, and how it ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback

from kvdrift.exit_codes import INTERRUPTED, failure_code

# With Python's own 700 the collector searches all objects of torch and Prefect, a million, every few seconds during
# the import.
_NEW_OBJECTS = 10_000


def program() -> None:
    """Run the command that the arguments name, and exit as it does.

    The process ends as soon as everything that registered with ``atexit`` has been called. Python would then take
    modules and objects apart one by one, which takes it two seconds where torch and Prefect were imported.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    code: int | None = None

    def leave() -> None:
        if code is None:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # no reader is left; Python handles that
            return
        os._exit(code)

    atexit.register(leave)  # the function that is registered first is called last
    try:
        from kvdrift.command import main  # imported only now, since this import registers functions too

        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else None
        raise
    except KeyboardInterrupt:  # Ctrl-C while commands were being imported
        sys.exit(code := INTERRUPTED)
    except Exception:  # noqa: BLE001 - an installation that lacks something, before main can say so in a line
        traceback.print_exc()
        code = failure_code([argument for argument in sys.argv[1:] if argument != "--debug"])
        sys.exit(code)
