"""``kvdrift status --metrics``: the status as OpenMetrics text.

Every metric is a gauge, without a time of its own. The text is then also valid in Prometheus' older text format, for
which ``# UNIT`` and ``# EOF`` are comments: node_exporter's textfile collector reads that format alone, and refuses
samples with times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

Labels = Mapping[str, str]


class _Gauge(NamedTuple):
    name: str
    unit: str  # the end of the name; empty for a count
    meaning: str


_SINCE = "in seconds since 1970"
_GAUGES = (
    _Gauge("kvdrift_last_run_timestamp_seconds", "seconds", f"When the study was last run, {_SINCE}."),
    _Gauge("kvdrift_last_estimate_timestamp_seconds", "seconds", f"When estimates were last stored, {_SINCE}."),
    _Gauge("kvdrift_last_check_timestamp_seconds", "seconds", f"When the store was last verified, {_SINCE}."),
    _Gauge("kvdrift_check_faults", "", "Faults that the last check of the store found."),
    _Gauge("kvdrift_units", "", "Current units of the study."),
    _Gauge("kvdrift_underived_units", "", "Current units of the study that are not derived."),
    _Gauge("kvdrift_pending_units", "", "Units of the study that are still to be generated."),
    _Gauge("kvdrift_documents", "", "Documents of the study, by split."),
    _Gauge("kvdrift_generated_documents", "", "Documents of the study that have units, by split."),
    _Gauge("kvdrift_waiting_replicates", "", "Replicates that wait for positions and are in no estimate."),
    _Gauge("kvdrift_table_bytes", "bytes", "Bytes in the folder of a table, with its log and replaced files."),
    _Gauge("kvdrift_table_files", "", "Files in the folder of a table, with its log and replaced files."),
    _Gauge("kvdrift_store_bytes", "bytes", "Bytes of everything in the store."),
    _Gauge("kvdrift_store_files", "", "Files of everything in the store."),
)


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return the status of a store, as ``kvdrift status --json`` has it, as OpenMetrics text.

    Every sample has the label ``store``. What is unknown or has never been has no sample.
    """
    samples: dict[str, list[tuple[Labels, int]]] = {gauge.name: [] for gauge in _GAUGES}
    for name, labels, value in _samples(status):
        if value is not None:
            number = int(datetime.fromisoformat(value).timestamp()) if isinstance(value, str) else value
            samples[name].append(({"store": status["store"], **labels}, number))
    lines = []
    for name, unit, meaning in _GAUGES:
        lines += [f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {meaning}"]
        lines += [f"{name}{{{_labels(labels)}}} {value}" for labels, value in samples[name]]
    return "\n".join([*lines, "# EOF", ""])


def _samples(status: Mapping[str, Any]) -> Iterator[tuple[str, Labels, Any]]:
    yield "kvdrift_last_check_timestamp_seconds", {}, status["last_check"]
    yield "kvdrift_check_faults", {}, status["check_faults"]
    for study in status["studies"]:
        own = {"study": study["study"], "model": study["model"]}
        yield "kvdrift_last_run_timestamp_seconds", own, study["last_run"]
        yield "kvdrift_last_estimate_timestamp_seconds", own, study["last_estimate"]
        yield "kvdrift_units", own, study["units"]
        yield "kvdrift_underived_units", own, study["units"] - study["derived_units"]
        pending = study["pending"]
        yield "kvdrift_pending_units", own, None if pending is None else sum(work["units"] for work in pending)
        for split in study["splits"]:
            place = {**own, "split": split["split"] or ""}
            yield "kvdrift_documents", place, split["documents"]
            yield "kvdrift_generated_documents", place, split["generated"]
        yield "kvdrift_waiting_replicates", own, study["waiting_replicates"]
    for table, size in status["size"]["tables"].items():
        yield "kvdrift_table_bytes", {"table": table}, size["bytes"]
        yield "kvdrift_table_files", {"table": table}, size["files"]
    yield "kvdrift_store_bytes", {}, status["size"]["bytes"]
    yield "kvdrift_store_files", {}, status["size"]["files"]


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    """Escape a label's value; control characters, which no terminal should get, are written as Python writes them."""
    value = "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in value
    )
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
