"""Verify everything in a store; only the file ``.checked`` is written.

The store may be written meanwhile. One version of each table is checked. The version of a table that refers to other
tables is chosen before their versions, so that a commit in between leaves no row without the rows that it refers to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvdrift.log.store import Store
from kvdrift.log.studies import Waiting, count_waiting
from kvdrift.log.units.unit import NUMBERED
from kvdrift.schema.errors import DamagedStoreError, InputError, KvdriftError
from kvdrift.schema.location import is_local
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog import PINNING, breaches, computed_views, contract_checks, open_views
from kvdrift.sql.catalog_file import CATALOG_NAME, catalog_fault
from kvdrift.verification.files import (
    Fault,
    Verified,
    check_leftovers,
    check_logs,
    check_small_table,
    memory_of,
    number_of,
    read_files,
    remember,
)
from kvdrift.verification.references import (
    check_citations,
    check_conditions,
    check_identities,
    check_kept_sets,
    check_owners,
    check_plans,
    check_prompts,
    check_scores,
)
from kvdrift.verification.units import UnitWalk, covered_versions

_SMALL = (
    "studies", "documents", "actions", "exact_values", "identities", "units", "plans", "looks", "results",
    "calibration", "scores", "tokens",
)  # fmt: skip


def verify(store: Store, progress: Progress = SILENT) -> Iterator[Verified]:
    """Check a store, finished or being written; only ``.checked`` is written.

    Yields each check when it is done. If a table's log is damaged, the check that says so is the last.
    """
    logs = check_logs(store)
    yield logs
    if logs.faults:
        return
    covered = covered_versions(store)
    versions = {table: store.version(table) for table in PINNING}
    memory = memory_of(store)
    small = {table: check_small_table(store, table, versions[table], memory) for table in _SMALL}
    large = {table: read_files(store, table, versions[table], memory) for table in NUMBERED}
    documents, actions = small["documents"].rows, small["actions"].rows
    prompts = check_prompts(store, versions["prompts"], memory, documents)
    remember(store, memory, versions)
    yield from (small[table].check for table in ("studies", "documents", "actions", "exact_values"))
    yield prompts
    controls = {(row["study"], row["action"]) for row in actions.to_pylist() if row["control"]}
    units = UnitWalk(store, small["units"], versions, covered, large, controls)
    yield from units.checks(progress)
    if small["documents"].readable and small["actions"].readable:
        yield check_owners(units.records, documents, actions)
    known = small["documents"].readable and units.readable
    yield check_scores(small["scores"], units.records, documents) if known else small["scores"].check
    yield small["tokens"].check
    refused = None
    if small["actions"].readable:
        yield check_identities(small["identities"], units.records)
        yield (kept_sets := check_kept_sets(units.records, actions))
        yield (conditions := check_conditions(units.records, small["studies"].rows, actions))
        if kept_sets.faults or conditions.faults:
            refused = "not computed: there are units that must not be pooled"

    yield check_plans(store, small["plans"], units.records, documents, versions["events"])
    for table in ("looks", "results", "calibration"):
        yield check_citations(small[table], small["plans"], versions["events"])
    if not units.readable or not all(table.readable for table in small.values()):
        refused = "not computed: there are files that cannot be read"
    yield check_views(store, versions, progress, refused)
    yield check_leftovers(store)
    if (pieces := check_waiting(store)).faults or pieces.notes:
        yield pieces
    if is_local(store.location) and Path(store.location, CATALOG_NAME).exists():
        fault = catalog_fault(store)
        yield Verified("catalogue", "1 file", "that DuckDB opens", (Fault(CATALOG_NAME, fault),) if fault else ())


def scrub(store: Store, seconds: float) -> Iterator[Verified]:
    """Read the files of a local store that were not found whole in the last ``seconds``, so that damage is noticed.

    Yields the check of the logs; if they are whole, one check for each table.
    """
    if not is_local(store.location):
        raise InputError(f"{store.location}: --since needs a local store, which remembers when each file was read")
    logs = check_logs(store)
    yield logs
    if logs.faults:
        return
    versions, memory = {table: store.version(table) for table in PINNING}, memory_of(store)
    try:
        for table in TABLES:
            files = read_files(store, table, versions[table], memory, within=seconds)
            others = len(store.paths(table, versions[table])) - files.read
            looked_at = f"{number_of(files.read, 'file')} read, {others:,} read before"
            yield Verified(table, looked_at, "whole", files.faults)
    finally:
        remember(store, memory, versions)


def check_views(store: Store, versions: Mapping[str, int], progress: Progress, refused: str | None) -> Verified:
    """Check that the contracts of all computed views hold, such as R = O + E C.

    If ``refused`` is given, it says why views are not computed, and nothing is checked.
    """
    names = computed_views()
    counts = f"{number_of(len(names), 'view')}, {number_of(sum(map(contract_checks, names)), 'promise')}"
    if refused is not None:
        return Verified("views", counts, refused)
    faults = []
    progress.begin("views", len(names), "views")
    try:
        # Every view is computed once and kept, since other views and contract checks read its rows.
        with open_views(store, versions, threads=os.cpu_count() or 1, kept=names) as views:
            for view in names:
                for breach in breaches(views, view):
                    where = f"view {view} ({', '.join(f'{name}={value}' for name, value in breach.example.items())})"
                    what = f"'{breach.promise}' does not hold in {number_of(breach.rows, 'row')}, must hold in all"
                    faults.append(Fault(where, what))
                progress.advance(1)
    except KvdriftError as error:
        faults.append(Fault("views", f"they cannot be computed ({error})"))
    return Verified("views", counts, "as their contracts say", tuple(faults))


def check_waiting(store: Store) -> Verified:
    """Count the incomplete replicates that wait in the folder ``pieces``, with a note for each study and model.

    A file of waiting rows that cannot be read is a fault.
    """
    waiting, faults = dict[tuple[str, str], Waiting](), list[Fault]()
    try:
        waiting = count_waiting(store)
    except DamagedStoreError as error:
        faults.append(Fault("pieces", str(error)))
    notes = [f"study {study}, model {model}: {count} wait" for (study, model), count in waiting.items()]
    total = number_of(sum(count.replicates for count in waiting.values()), "replicate")
    return Verified("pieces", total, "that lack positions and are in no estimate", tuple(faults), tuple(notes))
