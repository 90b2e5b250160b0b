"""Time large logs from events to trajectories and to the decomposition, against a query of DuckDB over the events.

    python -m benchmarks.scale                            # 10 and 100 million events: some five minutes, 3 GB of disk
    python -m benchmarks.scale --events 10e6 --json
    python -m benchmarks.scale --events 1e9 --folder DIR  # 8 GB of disk

Each part runs in a separate process. The log is synthetic: three actions, 64 replicates, 1,024 positions. The peer
computes R, O, E and C of each action by one query, without strata, incomplete trajectories or revisions. The bootstrap
has the quantities of the decomposition and 2,000 draws.

Rates are events per second. Targets at 1,000 million events on two cores: derivation, moments and views in 15 minutes
and 4 GiB, ``decomposition`` in a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb

import kvdrift
from benchmarks.analysis import moments_of
from benchmarks.measurement import Measured, Measurement, benchmark_parser, measure, mib, run
from benchmarks.synthetic_study import Sizes, write_study
from kvdrift.flows.estimate.estimation import Analysis, estimate_part, parts_of, subjects_of
from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.sql.quoting import parquet_files
from kvdrift.stats.bootstrap import Request
from kvdrift.transforms.pipeline import run_derivation

QUANTITIES = ("mismatch", "occurrence", "exposure", "mismatch_rate")
DRAWS = 2_000

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
    """Write a synthetic study of these sizes into a store, without deriving it."""
    write_study(location, sizes, derived=False)


def derive(location: str) -> int:
    """Derive all events; return the number of trajectories."""
    return run_derivation(location).trajectories


def open_alone(location: str) -> None:
    """Open and close a store's views without reading any."""
    kvdrift.open(location).close()


def decomposition(location: str) -> Cells:
    """Open the views; return each action's ``QUANTITIES``, pooled over strata, from view ``decomposition``."""
    with kvdrift.open(location) as views:
        query = f"select action, {', '.join(QUANTITIES)} from decomposition where stratum = 'pooled' order by action"  # noqa: S608
        return views.sql(query).fetchall()


def three_views(location: str) -> None:
    """Open the views and fetch ``decomposition``, ``contrasts`` and ``entry``."""
    with kvdrift.open(location) as views:
        for name in ("decomposition", "contrasts", "entry"):
            views.rows(name)


def bootstrap(location: str) -> int:
    """Estimate ``QUANTITIES`` with intervals from ``DRAWS`` draws; return the number of estimates."""
    analysis = Analysis("", "", "evaluation", 0, ((QUANTITIES, DRAWS),), Request(), None)
    moments = moments_of(location)
    return sum(len(rows) for rows in map(estimate_part, parts_of(analysis, moments, subjects_of(moments))))


def by_hand(location: str) -> Cells:
    """Compute the decomposition from the files of events by the query ``BY_HAND``."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("set enable_progress_bar = false")
        events = parquet_files(Store.open(location).files("events"))
        return connection.execute(BY_HAND.format(events=events)).fetchall()


DERIVE, VIEW, VIEW_PEER = "derive", "decomposition, opened", "DuckDB over events"
PARTS: dict[str, Callable[[str], Any]] = {
    DERIVE: derive,
    "open the views": open_alone,
    VIEW: decomposition,
    "three views, opened": three_views,
    "bootstrap, opened": bootstrap,
    VIEW_PEER: by_hand,
}


def measure_size(folder: Path, events: int) -> Measurement:
    """Measure one size on a store that is written in a folder; return rows and facts."""
    sizes, location = sizes_for(events), str(folder / f"events-{events}")
    parts: dict[str, Measured[Any]] = {"write the log": measure(write, location, sizes)}
    for name, part in PARTS.items():
        parts[name] = measure(part, location)
    check_equal(parts[VIEW].value, parts[VIEW_PEER].value)
    million = f"{sizes.events / 1e6:,.0f} M"
    derived = [parts[name] for name in (DERIVE, "three views, opened")]
    rows = [part.row(f"{million}: {name}", sizes.events / part.seconds) for name, part in parts.items()]
    ratio = parts[VIEW_PEER].seconds / parts[VIEW].seconds
    rows = [replace(row, peer=VIEW_PEER, ratio=ratio) if row.part.endswith(VIEW) else row for row in rows]
    return rows, {
        f"{million}_derived_and_viewed": f"{sum(part.seconds for part in derived):.0f} s, "
        f"peak {max(mib(part.peak_bytes) for part in derived):,.0f} MiB"
    }


def check_equal(ours: Cells, theirs: Cells) -> None:
    """Check that the view and the query have the same numbers, to 1e-9.

    Raises:
        OperationError: They have different numbers.
    """
    named = [(row[0], other[0]) for row, other in zip(ours, theirs, strict=True)]
    numbers = ((a, b) for row, other in zip(ours, theirs, strict=True) for a, b in zip(row[1:], other[1:], strict=True))
    if not ours or any(name != other for name, other in named) or any(abs(a - b) > 1e-9 for a, b in numbers):
        raise OperationError(f"view decomposition has {ours}, but the query over the events gives {theirs}")


if __name__ == "__main__":
    parser = benchmark_parser("scale", "Measure large logs, against DuckDB's queries over the events.")
    parser.add_argument(
        "--events", type=lambda text: int(float(text)), nargs="+", default=[10_000_000, 100_000_000],
        metavar="N", help="sizes; 10e6 100e6 by default",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    run(parser, "events", lambda options, folder: (measure_size(folder, events) for events in options.events))
