"""Large logs: from events to trajectories and to the decomposition, against DuckDB's queries over the same events.

    python -m benchmarks.scale                            # 10 and 100 million events: some five minutes, 3 GB of disk
    python -m benchmarks.scale --events 10e6 --json
    python -m benchmarks.scale --events 1e9 --folder DIR  # 8 GB of disk; a log that DIR has is derived anew

Each part runs in a process of its own. The log is synthetic: three actions, 64 replicates, 1,024 positions. Of the
derivation the peer makes one table of steps and one of trajectories by a window query, and writes both; since the query
holds all steps at once, the peer runs for up to 20 million events. It has no runs of agreement. Of the decomposition
the peer computes R, O, E and C of each action by one query, without strata, incomplete trajectories or revisions. The
bootstrap has the quantities of the decomposition and 2,000 draws.

Rates are events per second. Targets at 1,000 million events on two cores: derivation, moments and views in 15 minutes
and 4 GiB, ``decomposition`` in a second.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

import kvdrift
from benchmarks.analysis import moments_of
from benchmarks.measurement import Measured, Measurement, benchmark_parser, compared, measure, mib, run
from benchmarks.synthetic_study import Sizes, write_study
from kvdrift.flows.estimate.estimation import Analysis, one_by_one, parts_of, subjects_of
from kvdrift.log.store import Store
from kvdrift.log.units.unit import DERIVED
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.tables import PLAIN
from kvdrift.sql.quoting import parquet_files
from kvdrift.stats.bootstrap import Request
from kvdrift.transforms.pipeline import run_derivation

QUANTITIES = ("mismatch", "occurrence", "exposure", "mismatch_rate")
DRAWS = 2_000
MOST_DERIVED = 20_000_000  # events whose steps the peer's query holds

STEPS_QUERY = """
create table steps as
with

placed as (
    select
        *,
        cast(x_token <> y_token as integer) as mismatch,
        max(t) over pair as horizon,
        min(t) filter (where x_token <> y_token) over pair as tau,
        min(t) filter (where x_eos) over pair as eos_x,
        min(t) filter (where y_eos) over pair as eos_y
    from {events}
    window pair as (partition by study, model, doc, action, replicate)
),

absorbed as (
    select
        *,
        least(coalesce(eos_x, horizon + 1), coalesce(eos_y, horizon + 1)) as first_eos,
        greatest(coalesce(eos_x, horizon + 1), coalesce(eos_y, horizon + 1)) as last_eos
    from placed
)

select
    study,
    model,
    doc,
    action,
    replicate,
    t,
    mismatch,
    case when t >= tau then t - tau end as lag,
    cast(t >= first_eos as integer) + cast(t > first_eos as integer) + cast(t > last_eos as integer) as eos_set,
    delta,
    f
from absorbed
"""

TRAJECTORIES_QUERY = """
create table trajectories as
select
    study,
    model,
    doc,
    action,
    replicate,
    min(t) filter (where lag = 0) as tau,
    min(t) filter (where eos_set = 1) as first_eos,
    max(t) as horizon,
    sum(mismatch) as mismatches,
    sum(delta) as sum_delta,
    sum(f) as sum_f,
    count(*) filter (where lag > 0) as exposure,
    sum(mismatch) filter (where lag > 0) as occupation
from steps
group by study, model, doc, action, replicate
"""

BY_HAND = """
with

pairs as (
    select
        doc,
        action,
        replicate,
        max(t) as horizon,
        min(t) filter (where x_token <> y_token) as tau,
        count(*) filter (where x_token <> y_token) as mismatches
    from {events}
    group by doc, action, replicate
),

documents as (
    select
        doc,
        action,
        avg(mismatches / horizon) as mismatch,
        avg(if(tau is null, 0, 1) / horizon) as occurrence,
        avg(if(tau is null, 0, horizon - tau) / horizon) as exposure,
        avg(if(tau is null, 0, mismatches - 1) / horizon) as occupation
    from pairs
    group by doc, action
)

select
    action,
    avg(mismatch) as mismatch,
    avg(occurrence) as occurrence,
    avg(exposure) as exposure,
    avg(occupation) / avg(exposure) as mismatch_rate
from documents
group by action
order by action
"""

Cells = list[tuple[Any, ...]]  # an action and its quantities


def sizes_for(events: int) -> Sizes:
    """Return the sizes of a study of one stratum with at least ``events`` events."""
    shape = Sizes(strata=1, documents=1, replicates=64, horizon=1024)
    return Sizes(strata=1, documents=-(-events // shape.events), replicates=64, horizon=1024)


def write(location: str, sizes: Sizes) -> None:
    """Write the log."""
    write_study(location, sizes, derived=False)


def is_written(location: str, sizes: Sizes) -> bool:
    """Tell whether the log exists and is whole."""
    try:
        return Store.open(location).row_count("events") == sizes.events
    except InputError:
        return False


def forget_derived(location: str) -> None:
    """Empty the tables that are made from the log."""
    for table in DERIVED[PLAIN]:
        shutil.rmtree(Path(location, table))
    Store.create(location)


def derive(location: str) -> tuple[int, int]:
    """Derive all events; return the numbers of trajectories and mismatches."""
    trajectories = run_derivation(location).trajectories
    mismatches = Store.open(location).read("trajectories", columns=["mismatches"])["mismatches"]
    return trajectories, sum(mismatches.to_pylist())


def derive_by_hand(location: str) -> tuple[int, int]:
    """Derive all events by DuckDB, and write both tables; return the numbers of trajectories and mismatches."""
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(STEPS_QUERY.format(events=parquet_files(Store.open(location).files("events"))))
        connection.execute(TRAJECTORIES_QUERY)
        for table in ("steps", "trajectories"):
            connection.table(table).write_parquet(f"{location}-{table}.parquet", compression="zstd")
        row = connection.execute("select count(*), sum(mismatches) from trajectories").fetchall()[0]
    return int(row[0]), int(row[1])


def open_alone(location: str) -> None:
    """Open the views."""
    kvdrift.open(location).close()


def decomposition(location: str) -> Cells:
    """Open the views and return the decomposition."""
    with kvdrift.open(location) as views:
        query = f"select action, {', '.join(QUANTITIES)} from decomposition where stratum = 'pooled' order by action"  # noqa: S608
        return views.sql(query).fetchall()


def three_views(location: str) -> None:
    """Open the views and fetch three of them."""
    with kvdrift.open(location) as views:
        for name in ("decomposition", "contrasts", "entry"):
            views.rows(name)


def bootstrap(location: str) -> int:
    """Estimate the quantities with their intervals; return the number of intervals."""
    analysis = Analysis("", "", "evaluation", 0, ((QUANTITIES, DRAWS),), Request(), None)
    moments = moments_of(location)
    return sum(len(rows) for rows in one_by_one(parts_of(analysis, moments, subjects_of(moments))))


def by_hand(location: str) -> Cells:
    """Compute the decomposition from events."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("set enable_progress_bar = false")
        events = parquet_files(Store.open(location).files("events"))
        return connection.execute(BY_HAND.format(events=events)).fetchall()


DERIVE, DERIVE_PEER = "derive", "steps and trajectories by DuckDB"
VIEW, VIEW_PEER = "decomposition, opened", "DuckDB over events"
PARTS: dict[str, Callable[[str], Any]] = {
    DERIVE: derive,
    DERIVE_PEER: derive_by_hand,
    "open the views": open_alone,
    VIEW: decomposition,
    "three views, opened": three_views,
    "bootstrap, opened": bootstrap,
    VIEW_PEER: by_hand,
}


def measure_size(folder: Path, events: int) -> Measurement:
    """Measure one size in a folder's store, existing or new; return rows, and facts beside their targets."""
    sizes, location = sizes_for(events), str(folder / f"events-{events}")
    parts = dict[str, Measured[Any]]()
    if is_written(location, sizes):
        measure(forget_derived, location)
    else:
        parts["write the log"] = measure(write, location, sizes)
    for name, part in PARTS.items():
        if name != DERIVE_PEER or sizes.events <= MOST_DERIVED:
            parts[name] = measure(part, location)
    if DERIVE_PEER in parts and parts[DERIVE].value != parts[DERIVE_PEER].value:
        raise OperationError(f"derived are {parts[DERIVE].value}, by DuckDB {parts[DERIVE_PEER].value}")
    check_equal(parts[VIEW].value, parts[VIEW_PEER].value)
    million = f"{sizes.events / 1e6:,.0f} M"
    peers = {own: peer for own, peer in ((DERIVE, DERIVE_PEER), (VIEW, VIEW_PEER)) if peer in parts}
    derived = [parts[name] for name in (DERIVE, "three views, opened")]
    return compared(parts, sizes.events, peers, f"{million}: {{}}"), {
        f"{million}_derived_and_viewed": f"{sum(part.seconds for part in derived):.0f} s, "
        f"peak {max(mib(part.peak_bytes) for part in derived):,.0f} MiB"
    }


def check_equal(ours: Cells, theirs: Cells) -> None:
    """Check that the view and the query have the same numbers."""
    named = [(one[0], other[0]) for one, other in zip(ours, theirs, strict=True)]
    numbers = ((a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one[1:], other[1:], strict=True))
    if not ours or any(one != other for one, other in named) or any(abs(a - b) > 1e-9 for a, b in numbers):
        raise OperationError(f"the view has {ours}, the query {theirs}")


if __name__ == "__main__":
    parser = benchmark_parser("scale", "Measure large logs, against DuckDB's queries over the events.")
    parser.add_argument(
        "--events", type=lambda text: int(float(text)), nargs="+", default=[10_000_000, 100_000_000],
        metavar="N", help="sizes; 10e6 100e6 by default",
    )  # fmt: skip
    parser.add_argument(
        "--folder", dest="kept", type=Path, metavar="DIR",
        help="where to write and leave the stores, and to find earlier stores",
    )  # fmt: skip
    run(parser, "events",
        lambda options, folder: (measure_size(options.kept or folder, events) for events in options.events),
    )  # fmt: skip
