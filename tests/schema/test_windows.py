"""The windows of a study: their defaults at a horizon, valid values, and refusals."""

from __future__ import annotations

import pytest

from kvdrift.schema.errors import InputError
from kvdrift.schema.windows import Windows


def test_windows_at_128_are_the_papers() -> None:
    windows = Windows.of(128)
    assert windows == Windows(128, 64, 16, 49, 32, 64, 16, 0.99)
    assert windows.blocks == ((1, 32), (33, 64), (65, 128))
    assert (windows.early_lags, windows.late_lags) == (16, 16)


def test_halves_quarters_and_eighths_are_floors() -> None:
    assert Windows.of(31) == Windows(31, 15, 3, 13, 7, 15)
    tiny = Windows.of(1)
    assert (tiny.cohort_bound, tiny.early_lags, tiny.late_lags) == (0, 0, 0)
    assert tiny.blocks == ((1, 0), (1, 0), (1, 1))


def test_late_lags_end_at_an_overridden_bound() -> None:
    windows = Windows.of(128, cohort_bound=40, agreement_run=None)
    assert (windows.late_first, windows.agreement_run) == (25, 16)
    assert windows.without_horizon["cohort_bound"] == 40
    assert "horizon" not in windows.without_horizon


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cohort_bound": 9}, "windows.cohort_bound = 9: must be at most half the horizon, 8"),
        ({"early_last": 9}, "windows.early_last = 9: must be at most cohort_bound, 8"),
        ({"late_first": 10}, r"windows.late_first = 10: must be in 1..9 \(cohort_bound \+ 1\)"),
        ({"first_block_last": 9}, "first_block_last = 9 must be at most second_block_last = 8"),
        ({"second_block_last": 17}, "second_block_last = 17, and this at most the horizon, 16"),
    ],
)
def test_windows_that_do_not_fit_are_refused(overrides: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Windows.of(16, **overrides)
