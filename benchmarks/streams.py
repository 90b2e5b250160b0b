"""Time events that arrive as a stream: ``DeriveTrajectories`` on Beam's in-process runner, against the batch path.

    python -m benchmarks.streams                          # 2 million events over 1,000 replicates; half a minute
    python -m benchmarks.streams --replicates 16000 --horizon 128
    python -m benchmarks.streams --replicates 100 --horizon 200 --json

All rows are shuffled over all replicates; 1% of them come last, and 5% come twice. The peer derives the same rows, in
order, in memory. Each part runs in a separate process. The stream is cut into blocks of 131,072 rows, and each block
into pieces, one for each of its replicates. The cost grows with the number of pieces, so that the same number of rows
costs more if replicates are shorter.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measurement import Measurement, benchmark_parser, measure, run
from kvdrift.schema.tables import EVENTS, PAIR_COLUMNS
from kvdrift.transforms.derivation import derive_trajectories

BATCH_ROWS = 10_000  # of a batch, which is one element of the stream


def write_events(path: Path, replicates: int, horizon: int) -> None:
    """Write whole replicates in order to the file ``whole`` of a folder, and their events as a stream to ``stream``."""
    chance, rows = np.random.default_rng(1), replicates * horizon
    x = chance.integers(0, 50, rows)
    names = {name: np.repeat("one", rows) for name in ("study", "model", "doc", "action")}
    values = {
        "replicate": np.repeat(np.arange(replicates), horizon), "t": np.tile(np.arange(1, horizon + 1), replicates),
        "x_token": x, "y_token": np.where(chance.random(rows) < 0.1, x + 1, x),
        "delta": chance.random(rows), "f": chance.random(rows),
        "x_eos": np.zeros(rows, np.bool_), "y_eos": np.zeros(rows, np.bool_),
    }  # fmt: skip
    types = [EVENTS.schema.field(name).type for name in PAIR_COLUMNS]
    columns = [pa.array((names | values)[name]).cast(kind) for name, kind in zip(PAIR_COLUMNS, types, strict=True)]
    whole = pa.table(columns, names=PAIR_COLUMNS)
    order = chance.permutation(rows)
    again, late = chance.choice(rows, rows // 20, replace=False), order[: rows // 100]
    for name, table in (
        ("whole", whole),
        ("stream", whole.take(np.concatenate([order[len(late) :], again, late])).combine_chunks()),
    ):
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=BATCH_ROWS)


def derive_whole(path: Path) -> int:
    """Derive all replicates of the file ``whole`` in a folder by one call; return the number of steps."""
    with pa.memory_map(str(path / "whole")) as source:
        return int(derive_trajectories(pa.ipc.open_file(source).read_all()).steps.num_rows)


def derive_stream(path: Path, horizon: int) -> int:
    """Derive the file ``stream`` in a folder by Beam's in-process runner; return the number of steps."""
    import apache_beam as beam  # noqa: PLC0415 - the peer's process needs no Beam

    from kvdrift.transforms import DeriveTrajectories  # noqa: PLC0415

    logging.disable(logging.WARNING)
    file = str(path / "stream")

    def batch(number: int) -> pa.RecordBatch:
        with pa.memory_map(file) as source:
            return pa.ipc.open_file(source).get_batch(number)

    with pa.memory_map(file) as source:
        batches = pa.ipc.open_file(source).num_record_batches
    counted = path / "counted"
    with beam.Pipeline(runner="FnApiRunner", options=beam.options.pipeline_options.PipelineOptions([])) as pipeline:
        numbers = pipeline | beam.Create(range(batches)) | beam.Reshuffle()
        derived = numbers | beam.Map(batch).with_output_types(pa.RecordBatch) | DeriveTrajectories(horizon)
        steps = derived | beam.Map(lambda part: part.steps.num_rows) | beam.CombineGlobally(sum)
        _ = steps | beam.Map(lambda total: counted.write_text(str(total)))
    return int(counted.read_text())


def compare(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure the derivation of the same events in order and as a stream."""
    rows = options.replicates * options.horizon
    # In another process, since a child process inherits the peak memory of this one.
    measure(write_events, folder, options.replicates, options.horizon)
    whole, stream = measure(derive_whole, folder), measure(derive_stream, folder, options.horizon)
    if not whole.value == stream.value == rows:
        raise SystemExit(f"{whole.value} steps in order and {stream.value} from the stream, must both be {rows}")
    arrived = rows + rows // 20
    table = [
        whole.row("derived in order", rows / whole.cpu_seconds),
        stream.row("stream", arrived / stream.cpu_seconds, "derived in order", whole.cpu_seconds / stream.cpu_seconds),
    ]
    yield table, {
        "events": rows, "events_that_arrive": arrived, "events_a_cpu_second": round(arrived / stream.cpu_seconds),
    }  # fmt: skip


if __name__ == "__main__":
    parser = benchmark_parser("streams", "a stream of events through Beam against the batch path")
    parser.add_argument("--replicates", type=int, default=1_000)
    parser.add_argument("--horizon", type=int, default=2_000)
    run(parser, "events", compare)
