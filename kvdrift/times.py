"""The times that ``kvdrift status`` and ``kvdrift gate`` report, as JSON and monitors take them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdrift.log.last_times import LastTimes
    from kvdrift.log.store import Store


def last_of_study(store: Store, study: str, model: str, times: LastTimes) -> dict[str, str | None]:
    """Return when a study was last run and estimated, as the fields ``last_run`` and ``last_estimate``."""
    from kvdrift.flows.estimate.current import estimated_at

    run = times.runs.get((study, model))
    return {"last_run": iso(run), "last_estimate": iso(estimated_at(store, study, model, times))}


def iso(at: datetime | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None stays None."""
    return None if at is None else f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
