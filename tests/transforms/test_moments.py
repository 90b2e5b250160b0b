"""Moments of units and of replicates against loops over positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.awkward_logs import LOGS, awkward_log, number_events
from oracles.coupled_paths import Analysis
from oracles.unit_moment_definitions import summed
from oracles.view_definitions import scalar_moments, steps, trajectories
from oracles.view_definitions import windows as windows_of

from kvdrift.schema.tables import STEPS, TRAJECTORIES, UNIT_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.transforms.moments import derive_moments, replicate_moments

REPLICATE = ("doc", "action", "replicate")
TOLERANCE = 1e-12  # sums in another order


@pytest.mark.parametrize("name", sorted(LOGS))
def test_moments_are_sums_over_the_replicates_of_a_unit(name: str) -> None:
    analysis = Analysis(number_events(awkward_log(name)))
    derived = derived_of(analysis)
    studies = {(row["study"], row["model"]): Windows.from_row(row) for row in analysis.log.studies}
    found = {row["unit"]: row for row in derive_moments(*derived, studies).to_pylist()}
    assert set(found) == set(derived[0]["unit"].to_pylist())
    assert UNIT_MOMENTS.schema.equals(derive_moments(*derived, studies).schema)
    entering = {path.unit for path in analysis.paths}
    for unit in entering - {None}:
        paths = [path for path in analysis.paths if path.unit == unit]
        wanted = summed(analysis, paths, unit or 0)
        assert set(found[unit]) == set(wanted)
        wrong = {key: (found[unit][key], value) for key, value in wanted.items() if not same(found[unit][key], value)}
        assert not wrong, (name, unit)


@pytest.mark.parametrize("name", ["several studies", "long agreements", "horizon 1"])
def test_moments_of_single_replicates(name: str) -> None:
    analysis = Analysis(number_events(awkward_log(name)))
    derived = derived_of(analysis)
    for (study, model), found in analysis.windows.items():
        rows = derived[0].filter(pc.and_(pc.equal(derived[0]["study"], study), pc.equal(derived[0]["model"], model)))
        steps = derived[1].filter(pc.and_(pc.equal(derived[1]["study"], study), pc.equal(derived[1]["model"], model)))
        (windows,) = (
            Windows.from_row(row) for row in windows_of(analysis) if (row["study"], row["model"]) == (study, model)
        )
        table = {
            tuple(row[key] for key in REPLICATE): row for row in replicate_moments(rows, steps, windows).to_pylist()
        }
        paths = [
            path for path in analysis.paths if (path.study, path.model) == (study, model) and path.unit is not None
        ]
        assert set(table) >= {tuple(getattr(path, key) for key in REPLICATE) for path in paths}
        for path in paths:
            row = table[tuple(getattr(path, key) for key in REPLICATE)]
            wanted = scalar_moments(path, found)
            wrong = {key: (row[key], value) for key, value in wanted.items() if not same(row[key], value)}
            assert not wrong, (name, path.doc)


def test_units_whose_replicates_do_not_enter_have_zeros() -> None:
    """Such units are derived, or they would be looked for again and again."""
    known, of_known = derived_of(Analysis(number_events(awkward_log("horizon 3"))))
    unit = known["unit"][0].as_py()
    complete = pa.array(known["unit"].to_numpy() != unit)
    cut = known.set_column(known.column_names.index("complete"), known.schema.field("complete"), complete)
    found = {row["unit"]: row for row in derive_moments(cut, of_known, {}).to_pylist()}
    assert set(found) == set(known["unit"].to_pylist())
    assert [number for number, row in found.items() if row["replicates"] == 0] == [unit]
    assert found[unit]["scalar_mismatch"] == found[unit]["scalar_diverged"] == 0
    assert found[unit]["position_delta"] == [0.0] * found[unit]["horizon"]


def derived_of(analysis: Analysis) -> tuple[pa.Table, pa.Table]:
    """Trajectories and steps of whole units, from their definition."""
    kept = sorted((row for row in trajectories(analysis) if row["unit"] is not None), key=key_of)
    of_path: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in steps(analysis):
        of_path.setdefault(key_of(row), []).append(row)
    each = [of_path[key_of(row)] for row in kept]
    return (
        pa.Table.from_pylist(kept, schema=TRAJECTORIES.schema),
        pa.Table.from_pylist([row for rows in each for row in rows], schema=STEPS.schema),
    )


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in TRAJECTORIES.key)


def same(left: Any, right: Any) -> bool:
    if left is None or right is None or isinstance(right, str):
        return bool(left == right)
    return np.shape(left) == np.shape(right) and bool(np.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE))
