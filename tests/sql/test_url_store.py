"""Views over a store behind a URL: the rows of the same store in a folder, and only the parts that a query needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fixtures.s3_server import S3Server, s3_server

from kvdrift.log.store import Store, Unit
from kvdrift.schema.location import filesystem_of
from kvdrift.schema.tables import EVENTS
from kvdrift.sql.catalog import open_views

DOCS = ("first", "second", "third", "fourth")
REPLICATES, HORIZON = 64, 1024


def random_events(doc: str, seed: int) -> pa.Table:
    """Events that no encoding makes small."""
    draws = np.random.default_rng(seed)
    count = REPLICATES * HORIZON
    tokens = {name: draws.integers(0, 2**31 - 1, count, dtype=np.int32) for name in ("x_token", "y_token")}
    variations = {name: draws.random(count, dtype=np.float32) for name in ("delta", "f")}
    keys = {"study": "url", "model": "random", "doc": doc, "action": "half", "kind": "coupled"}
    columns = {name: pa.array([value] * count) for name, value in keys.items()}
    columns |= {
        "replicate": np.repeat(np.arange(REPLICATES, dtype=np.int32), HORIZON),
        "t": np.tile(np.arange(1, HORIZON + 1, dtype=np.int32), REPLICATES),
        **tokens,
        **variations,
        "x_eos": np.zeros(count, dtype=np.bool_),
        "y_eos": np.zeros(count, dtype=np.bool_),
        "weight": pa.nulls(count, pa.float64()),
        **{name: pa.nulls(count, EVENTS.schema.field(name).type) for name in ("kl", "kl_own", "top1")},
        "action_revision": np.zeros(count, dtype=np.int32),
    }
    columns["unit"] = pa.nulls(count, pa.int64())  # the store fills it in
    return pa.table({name: columns[name] for name in EVENTS.columns}, schema=EVENTS.schema)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bucket")
    store = Store.create(root / "store")
    for seed, doc in enumerate(DOCS):
        record = {"study": "url", "model": "random", "doc": doc, "action": "half"}
        record |= {"first_replicate": 0, "replicates": REPLICATES, "horizon": HORIZON}
        store.append_units([Unit(record, random_events(doc, seed))])
    return root


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Iterator[S3Server]:
    """A server with a copy of the folder."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        for file in (path for path in folder.rglob("*") if path.is_file()):
            filesystem, path = filesystem_of(f"{server.url}/{file.relative_to(folder)}")
            with filesystem.open_output_stream(path) as target:
                target.write(file.read_bytes())
        yield server


@pytest.mark.slow
def test_a_url_store_has_the_rows_of_its_folder_and_reads_what_a_query_needs(folder: Path, bucket: S3Server) -> None:
    total = "select sum(f) as total, count(*) as events from events where doc = 'second'"
    first = "select * from events where t = 1 order by doc, replicate"
    views_of_files = ("units", "documents", "results", "plans")
    with open_views(Store.open(folder / "store")) as local:
        versions, rows = local.versions, {view: local.rows(view) for view in views_of_files}
        expected, first_rows = local.table(total).to_pylist(), local.table(first)
    assert expected == [{"total": pytest.approx(expected[0]["total"]), "events": REPLICATES * HORIZON}]
    before = event_bytes(bucket)
    with open_views(Store.open(f"{bucket.url}/store")) as remote:
        # Opening reads the logs, and of small tables what kept sets are compared by.
        assert event_bytes(bucket) == before
        assert remote.table(total).to_pylist() == expected
        read = event_bytes(bucket) - before
        assert remote.table(first).equals(first_rows)
        assert event_bytes(bucket) - before > read
        assert remote.versions == versions
        for view, own in rows.items():
            assert remote.rows(view).equals(own), view
    files = list(folder.glob("store/events/**/*.parquet"))
    whole = sum(file.stat().st_size for file in files)
    # One column in five of one file in four, and the footers of all four (64 KiB each at most).
    assert read < whole / 8 + len(files) * 65536


def event_bytes(bucket: S3Server) -> int:
    return sum(size for name, size in bucket.sent().items() if name.endswith(".parquet") and "/events/" in name)
