"""Bytes of an index: of units of earlier versions, which were charged one if nothing was removed, views take it off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kvdrift.generator.actions import Action, build_action
from kvdrift.generator.checks.random_models import random_document, random_model
from kvdrift.generator.generation import PendingUnit, generate_units
from kvdrift.generator.selectors import Full
from kvdrift.log.store import Store, Unit
from kvdrift.schema.retention import Retention
from kvdrift.schema.study import ActionSection
from kvdrift.schema.tables import ACTIONS, DOCUMENTS
from kvdrift.sql.catalog import open_views
from kvdrift.transforms.pipeline import run_derivation

LENGTH, HORIZON, HEADS = 150, 6, 2 * 2  # KV heads of all layers


def _action(name: str, **chosen: Any) -> Action:
    return build_action(ActionSection(name=name, **chosen))


WHOLE = (Action("full", "full", Full(), Retention(None)), _action("fp8", codec="fp8"))
NEVER = _action("never", policy="sliding", keep=LENGTH + HORIZON - 1)
REMOVING = (
    _action("half", selector="snapkv", keep="1/2"),
    _action("later", policy="sliding", keep=LENGTH + HORIZON - 2),
    _action("sliding", policy="sliding", keep="1/2"),
)
ACTIONS_HERE = (*WHOLE, NEVER, *REMOVING)


def store_of(folder: Path, units: list[Unit]) -> Store:
    store = Store.create(folder)
    names = {"study": "s", "split": "evaluation", "stratum": "all", "doc": "d", "cluster": "d"}
    names["model"] = units[0].record["model"]
    rows = [action.row("s", prespecified=True) for action in ACTIONS_HERE]
    document = pa.Table.from_pylist([dict.fromkeys(DOCUMENTS.columns) | names], schema=DOCUMENTS.schema)
    store.append_rows("documents", document)
    store.append_rows("actions", pa.Table.from_pylist(rows, schema=ACTIONS.schema))
    store.append_units(units)
    run_derivation(store.location)
    return store


def generated(first: int) -> list[Unit]:
    pending = [PendingUnit(action, first, 2) for action in ACTIONS_HERE]
    return generate_units(random_model("llama"), "s", random_document("d", LENGTH), pending, HORIZON, 7)


def charged(unit: Unit) -> Unit:
    """The unit as earlier versions recorded it: 4 bytes for each entry that bytes are counted of, and KV head."""
    if unit.record["index_bytes"]:
        return unit
    entries = LENGTH + HORIZON - 1 if unit.record["action"] == "never" else LENGTH
    resident = unit.record["resident_bytes"] + 4 * HEADS * LENGTH
    return replace(unit, record=unit.record | {"index_bytes": 4 * HEADS * entries, "resident_bytes": resident})


@pytest.mark.parametrize("grown", [False, True], ids=["older", "grown by this version"])
@pytest.mark.by_default("grown by this version")
def test_an_index_is_charged_only_if_something_is_removed(tmp_path: Path, *, grown: bool) -> None:
    units = [generated(0), generated(2)]
    assert {unit.record["action"] for unit in units[0] if unit.record["index_bytes"]} == {one.name for one in REMOVING}
    older = [[charged(unit) for unit in units[0]], units[1] if grown else [charged(unit) for unit in units[1]]]
    new, old = (
        store_of(tmp_path / name, [unit for part in parts for unit in part])
        for name, parts in (("new", units), ("old", older))
    )
    assert sum(old.read("units")["index_bytes"].to_pylist()) > sum(new.read("units")["index_bytes"].to_pylist())
    with open_views(new) as ours, open_views(old) as theirs:
        for view in ("units", "document_bytes", "frontier", "summary"):
            assert ours.rows(view).equals(theirs.rows(view)), view
        assert {row["action"] for row in theirs.rows("units").to_pylist() if row["index_bytes"] == 0} == {
            action.name for action in (*WHOLE, NEVER)
        }
