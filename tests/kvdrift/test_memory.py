"""The memory of a live derivation: it keeps nothing of finished batches, however many there were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.freshness import memory_load, observe
from schema.own_process import own_environment

# The command ends at once, since there is no store, in a process that is then as the watching one.
_PROGRAM = """
import io, os, sys
from contextlib import suppress
from kvdrift.command import main
with suppress(SystemExit):
    main(["derive", "nowhere", "--watch"])
import pyarrow as pa, pyarrow.dataset as pads, pyarrow.parquet as pq
pq.write_table(pa.table({"tau": range(100_000)}), sys.argv[1])
pads.dataset(sys.argv[1]).to_table()
print(pa.default_memory_pool().backend_name, pa.mimalloc_memory_pool().max_memory(), os.environ["_RJEM_MALLOC_CONF"])
"""


def test_all_of_arrow_allocates_where_a_live_derivation_gives_back(tmp_path: Path) -> None:
    """Arrow's own parts would otherwise use their own pool, whatever pool Python's callers choose."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path / "rows.parquet"],
        env=own_environment() | {"_RJEM_MALLOC_CONF": "narenas:3"},  # what the user chose stays
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "system 0 narenas:3\n"
    assert "kvdrift: " in ended.stderr
    assert "nowhere" in ended.stderr


@pytest.mark.slow
def test_memory_stays_what_it_was_after_a_hundred_commits(tmp_path: Path) -> None:
    """Within a tenth, while files of all sizes are put together."""
    seen = observe(tmp_path, memory_load(1200, 50.0, 8, 32), watched=True)
    assert seen.late <= 1.1 * seen.early
