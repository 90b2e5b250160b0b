"""Trajectories and steps of whole units -> the moments of ``kvdrift.schema.moments``, summed over a unit's replicates.

Moments are additive, so pooling units is pooling replicates. Only replicates that are complete and end at the study's
horizon H count: their steps are arrays [replicates, H].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.moments import NEVER, SCALAR_MOMENTS, UNIT_SUMS, Replicates
from kvdrift.schema.rows import Flags, Reals, Wide, run_begins
from kvdrift.schema.tables import GROUP_KEY, UNIT_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.transforms.event_columns import table_of

StudyWindows: TypeAlias = Mapping[tuple[str, str], Windows]
"""The windows of declared studies, by study and model."""

_Sums: TypeAlias = dict[str, npt.NDArray[Any]]
_KEY = (*GROUP_KEY, "action_revision", "unit")


def derive_moments(trajectories: pa.Table, steps: pa.Table, studies: StudyWindows) -> pa.Table:
    """Sum the moments of each unit over its replicates; return one row for each unit, of the schema UNIT_MOMENTS.

    Trajectories and steps are of whole units, of their schemas and sorted by key. ``studies`` has the windows of
    studies. A unit of any other study gets the default windows of the longest horizon among its complete trajectories,
    or among all its trajectories if none is complete. A mean over an empty window is null.
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
    """Yield every ``Windows`` that units have, with the places in ``keys`` of the units that have it.

    ``keys`` has a row for each unit, and ``of_row`` [M] the place in ``keys`` of each trajectory's unit.
    """
    horizon, complete = trajectories["horizon"].to_numpy(), trajectories["complete"].to_numpy()
    longest = np.zeros((2, keys.num_rows), dtype=np.int32)  # of complete trajectories, of all
    np.maximum.at(longest[0], of_row[complete], horizon[complete])
    np.maximum.at(longest[1], of_row, horizon)
    horizons = np.where(longest[0] > 0, longest[0], longest[1]).tolist()
    names = zip(keys["study"].to_pylist(), keys["model"].to_pylist(), horizons, strict=True)
    places_of: dict[Windows, list[int]] = {}
    for place, (study, model, last) in enumerate(names):
        places_of.setdefault(studies.get((study, model)) or Windows.of(last), []).append(place)
    for windows, places in places_of.items():
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
    """Return the rows of UNIT_MOMENTS of some units that have the same windows.

    ``units`` are the places of these units in ``keys``, and ``of_row`` [M] is the place of each trajectory's unit.
    """
    trajectories = derived.trajectories
    rows = np.flatnonzero(_entering(trajectories, windows) & np.isin(of_row, units))
    of_unit = np.searchsorted(units, of_row[rows])  # [K] place in ``units``
    entering = trajectories.select(_OF_TRAJECTORY).take(pa.array(rows))
    pairs = _replicates(entering, derived.steps, derived.first_step[rows][:, None], windows)
    sums = {column: _by_unit(moment.of(pairs), of_unit, len(units)) for column, moment in UNIT_SUMS.items()}
    sums |= _depths(pairs, of_unit, len(units))
    columns: dict[str, Any] = {name: column.combine_chunks() for name, column in _columns(keys.take(pa.array(units)))}
    columns |= {name: np.repeat(value, len(units)) for name, value in asdict(windows).items()}
    columns["replicates"] = np.bincount(of_unit, minlength=len(units)).astype(np.int32)
    for name, total in sums.items():  # NaN: an empty window
        columns[name] = pa.array(total, from_pandas=True) if total.ndim == 1 else _lists(total)
    return table_of(columns, UNIT_MOMENTS.schema)


def replicate_moments(trajectories: pa.Table, steps: pa.Table, windows: Windows) -> pa.Table:
    """Compute the scalar moments of each replicate that is complete and ends at the windows' horizon.

    Trajectories and steps are as in ``derive_moments``.

    Returns:
        The columns of ``GROUP_KEY``, ``replicate``, and float64 columns of the scalar moments; null over an empty
        window.
    """
    derived, rows = _Derived.of(trajectories, steps), np.flatnonzero(_entering(trajectories, windows))
    entering = trajectories.take(pa.array(rows))
    pairs = _replicates(entering, derived.steps, derived.first_step[rows][:, None], windows)
    columns = {name: entering[name] for name in (*GROUP_KEY, "replicate")}
    for name, moment in SCALAR_MOMENTS.items():
        columns[name] = pa.array(moment.of(pairs).astype(np.float64), from_pandas=True)
    return pa.table(columns)


def _entering(trajectories: pa.Table, windows: Windows) -> Flags:
    entering: Flags = trajectories["complete"].to_numpy() & (trajectories["horizon"].to_numpy() == windows.horizon)
    return entering


def _replicates(trajectories: pa.Table, steps: pa.Table, first_step: Wide, windows: Windows) -> Replicates:
    """Return K trajectories and their steps as arrays; ``first_step`` [K, 1] are the places of the first steps."""
    at = first_step + np.arange(windows.horizon)
    column = {name: trajectories[name] for name in _OF_TRAJECTORY}
    tau, eos_x, eos_y = (column[name].fill_null(NEVER).to_numpy() for name in ("tau", "eos_x", "eos_y"))
    delta, f, mismatch, kl, kl_own = (steps[name].to_numpy()[at] for name in ("delta", "f", "mismatch", "kl", "kl_own"))
    sums = {name: column[name].to_numpy() for name in ("mismatches", "sum_delta", "sum_f")}
    return Replicates(
        windows,
        **sums,
        exposed=column["exposure"].to_numpy(),
        occupied=column["occupation"].to_numpy(),
        tau=tau,
        eos_x=eos_x,
        eos_y=eos_y,
        longest_agreement=column["longest_agreement"].fill_null(-1).to_numpy(),
        mismatch_after_agreement=pc.fill_null(column["mismatch_after_agreement"], fill_value=False).to_numpy(),
        delta=delta.astype(np.float64),
        f=f.astype(np.float64),
        mismatch=mismatch,
        kl=kl.astype(np.float64),
        kl_own=kl_own.astype(np.float64),
        top1=steps["top1"].fill_null(fill_value=False).to_numpy()[at],
    )


_OF_TRAJECTORY = (
    "mismatches", "sum_delta", "sum_f", "exposure", "occupation", "tau", "eos_x", "eos_y", "longest_agreement",
    "mismatch_after_agreement",
)  # fmt: skip


def _depths(pairs: Replicates, of_unit: Wide, units: int) -> _Sums:
    """Sum H Z_L and H W_L over the replicates of each unit, [units, H] each, for the depths L = 1..H.

    H Z_L is the number of mismatches at lags below L, H W_L the number of lags from L on that are within the horizon.
    Means of Z_L and W_L are R_L and B_L of ``docs/quantities.md``.
    """
    horizon = pairs.windows.horizon
    lag = pairs.t - pairs.tau[:, None]  # [K, H]
    replicate, position = np.nonzero(lag >= 0)
    at = of_unit[replicate] * horizon + lag[replicate, position]
    mismatched = pairs.mismatch[replicate, position] != 0
    there, open_ = (
        np.bincount(cells, minlength=units * horizon).reshape(units, horizon) for cells in (at[mismatched], at)
    )
    beyond = open_[:, ::-1].cumsum(axis=1)[:, ::-1] - open_
    return {"depth_observed": there.cumsum(axis=1), "depth_capacity": beyond}


def _by_unit(values: npt.NDArray[Any], of_unit: Wide, units: int) -> Reals:
    """Sum ``values`` [K, ...] over the replicates of each unit, in their order: [units, ...]; 0 without replicates."""
    total = np.zeros((units, *values.shape[1:]))
    if len(of_unit):
        begins = np.flatnonzero(run_begins(of_unit, of_unit))
        total[of_unit[begins]] = np.add.reduceat(values, begins, axis=0, dtype=np.float64)
    return total


def _lists(values: Reals) -> pa.ListArray:
    """Return ``values``, [units, length], as a column of lists."""
    units, length = values.shape
    offsets = np.arange(units + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))


def _columns(rows: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    return zip(rows.column_names, rows.columns, strict=True)
