"""The windows of a study: the positions, lags and blocks of its quantities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvdrift.schema.errors import InputError


@dataclass(frozen=True)
class Windows:
    """The horizon and all windows of a study, named as in the ``studies`` table.

    The fixed branch cohort is the pairs with tau <= T = ``cohort_bound``. Early lags are 1..``early_last``, late lags
    ``late_first``..T. A window may be empty; a mean over an empty window is null.
    """

    horizon: int  # H, in tokens
    cohort_bound: int  # T, in tokens; at most H/2
    early_last: int  # the last early lag, in tokens
    late_first: int  # the first late lag, in tokens; T + 1 if there are no late lags
    first_block_last: int  # the last position of block 1
    second_block_last: int  # the last position of block 2; block 3 ends at H
    agreement_run: int = 16  # the length from which a run of agreements is long, in tokens
    saturation_threshold: float = 0.99  # the total variation above which a delta is saturated

    def __post_init__(self) -> None:
        horizon, bound = self.horizon, self.cohort_bound
        if horizon < 1:
            raise InputError(f"horizon = {horizon}: must be at least 1")
        if not 0 <= bound <= horizon // 2:
            raise InputError(f"windows.cohort_bound = {bound}: must be at most half the horizon, {horizon // 2}")
        if not 0 <= self.early_last <= bound:
            raise InputError(f"windows.early_last = {self.early_last}: must be at most cohort_bound, {bound}")
        if not 1 <= self.late_first <= bound + 1:
            raise InputError(f"windows.late_first = {self.late_first}: must be in 1..{bound + 1} (cohort_bound + 1)")
        if not 0 <= self.first_block_last <= self.second_block_last <= horizon:
            raise InputError(
                f"windows: first_block_last = {self.first_block_last} must be at most second_block_last = "
                f"{self.second_block_last}, and this at most the horizon, {horizon}"
            )

    @classmethod
    def of(cls, horizon: int, **overrides: float | None) -> Windows:
        """Return the windows that scale with a horizon: halves, quarters and eighths of H, rounded down.

        ``overrides`` are values by the windows' names, in place of the defaults; None keeps the default.
        """
        chosen: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        bound = chosen.setdefault("cohort_bound", horizon // 2)
        scaled: dict[str, Any] = {
            "early_last": horizon // 8,
            "late_first": bound - horizon // 8 + 1,
            "first_block_last": horizon // 4,
            "second_block_last": horizon // 2,
        }
        return cls(horizon, **(scaled | chosen))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Windows:
        """Return the windows of a row of the table ``studies`` or the view ``windows``; other columns are ignored."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    @property
    def without_horizon(self) -> dict[str, int | float]:
        """All values but the horizon, by name, as a frozen plan records them."""
        return {name: value for name, value in asdict(self).items() if name != "horizon"}

    @property
    def early_lags(self) -> int:
        """The number of early lags."""
        return self.early_last

    @property
    def late_lags(self) -> int:
        """The number of late lags."""
        return self.cohort_bound - self.late_first + 1

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The first and last position of each of the three blocks; an empty block ends before it begins."""
        return (
            (1, self.first_block_last),
            (self.first_block_last + 1, self.second_block_last),
            (self.second_block_last + 1, self.horizon),
        )
