"""The pipeline of docs/beam.md runs as it stands, with messages from memory in place of a broker's."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import apache_beam as beam
import pytest
from fixtures.beam_results import events, shuffled

import kvdrift

PAGE = Path(__file__).resolve().parents[2] / "docs/beam.md"


def test_from_a_topic_to_the_views(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 20
    stream = shuffled(events(12, 64, ends=False), doubled=0.05).to_pylist()
    stream.append(stream[0] | {"replicate": 99})
    messages = [(b"", json.dumps(row).encode()) for row in stream]
    store, documents = tmp_path / "store", tmp_path / "documents.jsonl"
    rows = [{"doc": f"d{number}", "stratum": "x", "split": "evaluation"} for number in range(3)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for old, new in {
        "from apache_beam.io.kafka import ReadFromKafka\n": "",
        'ReadFromKafka({"bootstrap.servers": "broker:9092"}, ["events"])': "beam.Create(messages)",
        "PipelineOptions()": 'PipelineOptions([], runner="FnApiRunner")',
        "/shared/stores/mine": str(store),
        "/shared/documents.jsonl": str(documents),
    }.items():
        assert old in code
        code = code.replace(old, new)
    with caplog.at_level(logging.WARNING):
        exec(code, {"messages": messages, "beam": beam})  # noqa: S102 - the page's own code
    assert "only 1 of the replicate's 64 positions came: 1 rows" in caplog.text
    found = kvdrift.open(store).sql("select sum(trajectories) from decomposition where stratum = 'pooled'").fetchall()
    assert found == [(12,)]
