"""Which stages of a scheduled run are tried again, and after how long."""

from __future__ import annotations

from typing import Any

from schema.errors import ControlError, DamagedStoreError, InputError

DELAYS = (10.0, 60.0, 300.0)  # seconds before the second, third and fourth try of a stage
_FOR_GOOD = (InputError, ControlError, DamagedStoreError)


def retried() -> dict[str, Any]:
    """Return the options of a task that is tried again, unless trying again cannot help.

    What a person has to mend fails at once: a mistake in the study file, a control that is not 0, a damaged store.
    """
    return {"retries": len(DELAYS), "retry_delay_seconds": list(DELAYS), "retry_condition_fn": may_pass}


def may_pass(_task: Any, _task_run: Any, state: Any) -> bool:
    """Tell whether what a task failed with may be gone when it is tried again."""
    return not isinstance(state.data, _FOR_GOOD)
