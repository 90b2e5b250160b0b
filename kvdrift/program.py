"""The process of the ``kvdrift`` command: its garbage collection and its end."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import traceback

from kvdrift.interrupts import INTERRUPTED, failure_code
from kvdrift.schema.proxies import past_proxies

# With Python's default of 700 the collector searches all objects of torch and Prefect, a million, every few seconds
# during the import.
_NEW_OBJECTS = 10_000


def program() -> None:
    """Run the command that the arguments name, and exit with its code.

    The process ends as soon as everything that registered with ``atexit`` has been called. Otherwise Python would take
    modules and objects apart one by one, which takes two seconds if torch and Prefect were imported.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    os.environ.update(past_proxies(os.environ))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # letters that the terminal's encoding lacks are shown as "?"
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
