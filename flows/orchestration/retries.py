"""The stages of a scheduled run that are tried again, and the delays between tries."""

from __future__ import annotations

from typing import Any

from kvdrift.schema.errors import ControlError, DamagedStoreError, InputError

DELAYS = (10.0, 60.0, 300.0)  # seconds before the second, third and fourth try of a stage
_FOR_GOOD = (InputError, ControlError, DamagedStoreError)


def retried() -> dict[str, Any]:
    """Return the options of a task that is retried, unless a retry cannot help.

    A fault that a person must mend fails at once: a mistake in the study file, a control that is not 0, a damaged
    store.
    """
    return {"retries": len(DELAYS), "retry_delay_seconds": list(DELAYS), "retry_condition_fn": may_pass}


def may_pass(_task: Any, _task_run: Any, state: Any) -> bool:
    """Tell whether the error of a task may be gone when the task is tried again."""
    return not isinstance(state.data, _FOR_GOOD)
