"""Fixtures of the tests of ingestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.event_logs import Run, documents_csv, write

from kvdrift.ingestion.ingest import IngestReport, ingest


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Ingest tables into the one store of the test, the documents of DOCS being known."""

    def call(*logs: pa.Table, **options: Any) -> IngestReport:
        paths = [write(tmp_path / f"log{number}.parquet", log) for number, log in enumerate(logs)]
        documents = options.pop("documents") if "documents" in options else documents_csv(tmp_path)
        return ingest(tmp_path / "store", paths, documents, **options)

    return call
