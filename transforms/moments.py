"""Trajectories and steps of whole units -> the moments of each unit, summed over its replicates.

Moments are additive, so what is pooled from units is pooled from replicates (definitions, "Pooling"). Replicates enter
that are complete and end at the study's horizon H: their steps are arrays [replicates, H].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.rows import Flags, Reals, Wide, run_begins
from kvdrift.schema.tables import GROUP_KEY, TRAJECTORIES, UNIT_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.transforms.event_columns import NEVER, table_of

StudyWindows: TypeAlias = Mapping[tuple[str, str], Windows]
"""The windows of declared studies, by study and model."""

_Sums: TypeAlias = dict[str, npt.NDArray[Any]]
_KEY = (*GROUP_KEY, "action_revision", "unit")
_PROFILES = (
    *(f"position_{name}" for name in POSITION_MOMENTS), *(f"lag_{name}" for name in LAG_MOMENTS), "depth_observed",
    "depth_capacity",
)  # fmt: skip


def derive_moments(trajectories: pa.Table, steps: pa.Table, studies: StudyWindows) -> pa.Table:
    """Sum the moments of each unit over its replicates; return one row for each unit, of the schema UNIT_MOMENTS.

    Trajectories and steps are of whole units, of their schemas and sorted by key. Without windows of its study, a unit
    gets those of the longest horizon of its complete trajectories. A mean over an empty window is null, in each
    replicate.
    """
    unit = trajectories["unit"].to_numpy()
    begins = np.flatnonzero(run_begins(unit, unit))
    of_row = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(unit)))
    keys = trajectories.select(_KEY).take(pa.array(begins))
    derived = _Derived.of(trajectories, steps)
    parts, order = [], []
    for windows, units in _by_windows(keys, trajectories, of_row, studies):
        parts.append(_of_windows(derived, windows, units, of_row, keys))
        order.append(units)
    if not parts:
        return UNIT_MOMENTS.schema.empty_table()
    return pa.concat_tables(parts).take(pa.array(np.argsort(np.concatenate(order)))).combine_chunks()


def _by_windows(
    keys: pa.Table, trajectories: pa.Table, of_row: Wide, studies: StudyWindows
) -> Iterator[tuple[Windows, Wide]]:
    """Yield windows, and the places of the units in ``keys`` that have them."""
    horizon, complete = trajectories["horizon"].to_numpy(), trajectories["complete"].to_numpy()
    longest = np.zeros((2, keys.num_rows), dtype=np.int32)  # of complete trajectories, of all
    np.maximum.at(longest[0], of_row[complete], horizon[complete])
    np.maximum.at(longest[1], of_row, horizon)
    own = np.where(longest[0] > 0, longest[0], longest[1]).tolist()
    names = zip(keys["study"].to_pylist(), keys["model"].to_pylist(), own, strict=True)
    found: dict[Windows, list[int]] = {}
    for place, (study, model, last) in enumerate(names):
        found.setdefault(studies.get((study, model)) or Windows.of(last), []).append(place)
    for windows, places in found.items():
        yield windows, np.array(places)


@dataclass(frozen=True)
class _Derived:
    """M trajectories, their steps, and ``first_step`` [M]: the place of the first step of each trajectory."""

    trajectories: pa.Table
    steps: pa.Table
    first_step: Wide

    @classmethod
    def of(cls, trajectories: pa.Table, steps: pa.Table) -> _Derived:
        begins = run_begins(steps["unit"].to_numpy(), steps["replicate"].to_numpy())
        return cls(trajectories, steps, np.flatnonzero(begins))


def _of_windows(derived: _Derived, windows: Windows, units: Wide, of_row: Wide, keys: pa.Table) -> pa.Table:
    """Sum the moments of units that have the same windows."""
    trajectories = derived.trajectories
    enters = trajectories["complete"].to_numpy() & (trajectories["horizon"].to_numpy() == windows.horizon)
    rows = np.flatnonzero(enters & np.isin(of_row, units))
    of_unit = np.searchsorted(units, of_row[rows])  # [K] place in ``units``
    pairs = _Replicates(derived, rows, windows)
    sums = {name: _by_unit(values, of_unit, len(units)) for name, values in pairs.moments().items()}
    sums |= _depths(pairs, of_unit, len(units))
    columns: dict[str, Any] = {name: column.combine_chunks() for name, column in _columns(keys.take(pa.array(units)))}
    columns |= {name: np.repeat(value, len(units)) for name, value in asdict(windows).items()}
    columns["replicates"] = np.bincount(of_unit, minlength=len(units)).astype(np.int32)
    for name in SCALAR_MOMENTS:
        columns[f"scalar_{name}"] = pa.array(sums[name], from_pandas=True)  # NaN: an empty window
    columns |= {name: _lists(sums[name]) for name in _PROFILES}
    return table_of(columns, UNIT_MOMENTS.schema)


class _Replicates:
    """K complete replicates, the trajectories ``rows`` [K], with the same windows; arrays are [K] or [K, H]."""

    def __init__(self, derived: _Derived, rows: Wide, windows: Windows) -> None:
        self.windows, horizon = windows, windows.horizon
        own = derived.trajectories.select(_OF_TRAJECTORY).take(pa.array(rows))
        self._own = {name: column.to_numpy() for name, column in _columns(own) if not column.null_count}
        self.tau, self.eos_x, self.eos_y = (own[name].fill_null(NEVER).to_numpy() for name in ("tau", "eos_x", "eos_y"))
        self._longest = own["longest_agreement"].fill_null(-1).to_numpy()
        self._returned = pc.fill_null(own["mismatch_after_agreement"], fill_value=False).to_numpy()
        self.diverged = self.tau != NEVER
        self.cohort = self.tau <= windows.cohort_bound
        at = derived.first_step[rows][:, None] + np.arange(horizon)
        step = {name: derived.steps[name].to_numpy() for name in ("delta", "f", "mismatch")}
        self.delta, self.f = (step[name][at].astype(np.float64) for name in ("delta", "f"))
        self.mismatch = step["mismatch"][at]
        self.t = np.arange(1, horizon + 1, dtype=np.int32)  # [H]

    def moments(self) -> _Sums:
        """Return each moment of each replicate: scalars [K], profiles [K, H] and [K, T]; NaN over an empty window."""
        positions = {"delta": self.delta, "f": self.f, "mismatch": self.mismatch}
        positions["first_mismatch"] = self.t == self.tau[:, None]
        lags = self._lags()
        found = {f"position_{name}": positions[name] for name in POSITION_MOMENTS}
        found |= {f"lag_{name}": lags[name] for name in LAG_MOMENTS}
        return found | self._of_trajectories() | self._of_gaps() | self._of_lags(lags) | self._of_blocks()

    def _of_trajectories(self) -> _Sums:
        own, horizon, prefix = self._own, self.windows.horizon, self.windows.first_block_last
        written = np.minimum(np.maximum(self.eos_x, self.eos_y), horizon)
        return {
            "mismatch": own["mismatches"] / horizon,
            "rollout_tv": own["sum_delta"] / horizon,
            "fixed_history_tv": own["sum_f"] / horizon,
            "diverged": self.diverged,
            "entry": np.where(self.diverged, self.tau, 0),
            "exposure": own["exposure"] / horizon,
            "occupation": own["occupation"] / horizon,
            "cohort": self.cohort,
            "long_agreement": self.cohort & (self._longest >= self.windows.agreement_run),
            "mismatch_after_agreement": self.cohort & self._returned,
            "prefix_mismatch": self.mismatch[:, :prefix].sum(axis=1) / horizon,
            "prefix_diverged": self.tau <= prefix,
            "prefix_eos_x": self.eos_x <= prefix,
            "prefix_eos_y": self.eos_y <= prefix,
            "written": written / horizon,
            "written_exposure": np.where(self.diverged, written - self.tau, 0) / horizon,
        }

    def _of_gaps(self) -> _Sums:
        """EOS partition, saturation, and the compensators of occupation and exposure."""
        t, horizon, gap = self.t, self.windows.horizon, self.delta - self.f
        first, last = (end(self.eos_x, self.eos_y)[:, None] for end in (np.minimum, np.maximum))
        after = t > self.tau[:, None]
        sets = (t < first, t == first, (t > first) & (t <= last), t > last)
        found = {f"eos_gap_{r}": _sum_where(own, gap) / horizon for r, own in enumerate(sets)}
        found["saturation"] = (self.delta > self.windows.saturation_threshold).sum(axis=1) / horizon
        found["occupation_compensator"] = _sum_where(after, self.delta) / horizon
        found["exposure_compensator"] = _sum_where(~after, (horizon - t) * self.delta) / horizon
        return found

    def _lags(self) -> _Sums:
        """Profiles over j = 1..T of the cohort, [K, T]: tau + j never passes 2T <= H."""
        bound = self.windows.cohort_bound
        lag = np.arange(1, bound + 1)
        inside = np.broadcast_to(self.cohort[:, None], (len(self.tau), bound))
        at = np.where(inside, self.tau[:, None] + lag - 1, 0)
        before_end = self.tau[:, None] + lag < np.minimum(self.eos_x, self.eos_y)[:, None]
        return {
            "cohort_delta": np.where(inside, np.take_along_axis(self.delta, at, axis=1), 0.0),
            "cohort_mismatch": np.where(inside, np.take_along_axis(self.mismatch, at, axis=1), 0),
            "cohort_pre_eos": inside & before_end,
        }

    def _of_lags(self, lags: _Sums) -> _Sums:
        windows, found = self.windows, _Sums()
        spans = {"early": (0, windows.early_last), "late": (windows.late_first - 1, windows.cohort_bound)}
        for name, (begin, end) in spans.items():
            delta, pre_eos = (lags[profile][:, begin:end] for profile in ("cohort_delta", "cohort_pre_eos"))
            found[f"{name}_delta"] = _mean(delta)
            found[f"{name}_pre_eos_steps"] = pre_eos.sum(axis=1)
            found[f"{name}_pre_eos_delta"] = _sum_where(pre_eos, delta)
        return found

    def _of_blocks(self) -> _Sums:
        profiles = {"delta": self.delta, "f": self.f, "mismatch": self.mismatch}
        return {
            f"block_{number}_{name}": _mean(profile[:, first - 1 : last])
            for number, (first, last) in enumerate(self.windows.blocks, start=1)
            for name, profile in profiles.items()
        }


_OF_TRAJECTORY = [name for name in TRAJECTORIES.columns if name not in (*_KEY, "replicate", "horizon", "complete")]


def _depths(pairs: _Replicates, of_unit: Wide, units: int) -> _Sums:
    """Sum H Z_L and H W_L (definitions, "What a finite branch window leaves open") of each unit, [units, H].

    Both are running sums over one profile of lags: W_L counts the lags j >= L that a branch still has room for.
    """
    horizon = pairs.windows.horizon
    lag = pairs.t - pairs.tau[:, None]  # [K, H]
    replicate, position = np.nonzero(lag >= 0)
    at = of_unit[replicate] * horizon + lag[replicate, position]
    mismatched = pairs.mismatch[replicate, position] != 0
    there, open_ = (np.bincount(own, minlength=units * horizon).reshape(units, horizon) for own in (at[mismatched], at))
    beyond = open_[:, ::-1].cumsum(axis=1)[:, ::-1] - open_
    return {"depth_observed": there.cumsum(axis=1), "depth_capacity": beyond}


def _sum_where(flags: Flags, values: Reals) -> Reals:
    total: Reals = np.where(flags, values, 0.0).sum(axis=1)
    return total


def _mean(values: npt.NDArray[Any]) -> Reals:
    """The mean over the last axis; NaN over an empty window."""
    length = values.shape[1]
    mean: Reals = values.sum(axis=1) / length if length else np.full(len(values), np.nan)
    return mean


def _by_unit(values: npt.NDArray[Any], of_unit: Wide, units: int) -> Reals:
    """Sum [K, ...] over the replicates of each unit, in their order: [units, ...]; 0 for a unit without any."""
    total = np.zeros((units, *values.shape[1:]))
    if len(of_unit):
        begins = np.flatnonzero(run_begins(of_unit, of_unit))
        total[of_unit[begins]] = np.add.reduceat(values, begins, axis=0, dtype=np.float64)
    return total


def _lists(values: Reals) -> pa.ListArray:
    """[units, length] as a column of lists."""
    units, length = values.shape
    offsets = np.arange(units + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))


def _columns(rows: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    return zip(rows.column_names, rows.columns, strict=True)
