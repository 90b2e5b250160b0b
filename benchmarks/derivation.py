"""Events to trajectories and steps: the derivation and its pipeline against one DuckDB window query.

    python -m benchmarks.derivation                   # the paper's size, 7.1 M events: about a minute
    python -m benchmarks.derivation --documents 4 --replicates 8 --horizon 32 --json

Each part runs in a process of its own, on the same Parquet files. "derive" reads files one by one and derives in
memory. "pipeline" is all of ``kvdrift derive``, with compressed and synced files. DuckDB makes one table of steps
and one of trajectories by a window query, in memory or written as two files. Its query has no runs of agreement.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import duckdb

from benchmarks.measurement import Measurement, benchmark_parser, compared, measure, run
from benchmarks.synthetic_study import Sizes, add_size_options, sizes_of, write_study
from kvdrift.log.store import Store
from kvdrift.transforms.derivation import derive_trajectories
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import pending, read_events

STEPS_QUERY = """
create temp table steps as
with

placed as (
    select
        *,
        cast(x_token <> y_token as integer) as mismatch,
        max(t) over pair as horizon,
        min(t) filter (where x_token <> y_token) over pair as tau,
        min(t) filter (where x_eos) over pair as eos_x,
        min(t) filter (where y_eos) over pair as eos_y
    from read_parquet($files, hive_partitioning = false)
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
create temp table trajectories as
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


def derive_in_memory(location: str) -> tuple[int, int]:
    """Read and derive every segment; return the numbers of trajectories and mismatches."""
    trajectories = mismatches = 0
    store = Store.open(location)
    for segment in pending(store).segments:
        events, _ = read_events(store, segment)
        derived = derive_trajectories(events).trajectories
        trajectories += derived.num_rows
        mismatches += sum(derived["mismatches"].to_pylist())
    return trajectories, mismatches


def derive_store(location: str) -> tuple[int, int]:
    """Run the whole pipeline on a store that is not derived; return the numbers of trajectories and mismatches."""
    trajectories = run_derivation(location).trajectories
    return trajectories, sum(
        Store.open(location).read("trajectories", columns=["mismatches"])["mismatches"].to_pylist()
    )


def query_files(location: str, threads: int, folder: str | None = None) -> tuple[int, int]:
    """Derive by DuckDB and, given a folder, write both tables there; return trajectories and mismatches."""
    with duckdb.connect(config={"threads": threads}) as connection:
        connection.execute(STEPS_QUERY, {"files": Store.open(location).files("events")})
        connection.execute(TRAJECTORIES_QUERY)
        for table in ("steps", "trajectories") if folder else ():
            connection.table(table).write_parquet(f"{folder}/{table}.parquet", compression="zstd")
        row = connection.execute("select count(*), sum(mismatches) from trajectories").fetchall()[0]
    return int(row[0]), int(row[1])


def compare_derivations(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Write a study, derive it in every way, and compare."""
    sizes = sizes_of(options)
    location = write_study(str(folder / "store"), sizes, options.seed, derived=False).location
    one_thread, two_threads, written = (f"DuckDB {how}" for how in ("in memory, 1 thread", "in memory, 2 threads",
                                                                     "written, 2 threads"))  # fmt: skip
    parts = {
        one_thread: measure(query_files, location, 1),
        two_threads: measure(query_files, location, 2),
        written: measure(query_files, location, 2, str(folder)),
        "derive, one core": measure(derive_in_memory, location),
        "pipeline": measure(derive_store, location),
    }
    values = {name: part.value for name, part in parts.items()}
    if len(set(values.values())) > 1:
        raise RuntimeError(f"results differ: {values}")
    yield compared(parts, sizes.events, {"derive, one core": one_thread, "pipeline": written}), {"events": sizes.events}


if __name__ == "__main__":
    parser = benchmark_parser("derivation", "Measure the derivation and its pipeline, against a DuckDB query.")
    add_size_options(parser, Sizes())
    run(parser, "events", compare_derivations)
