"""The smallest study that has everything: laws of two tokens, both estimators; and what a store of it holds."""

from __future__ import annotations

import json
from pathlib import Path

from schema.store.store import Store
from schema.tables import TABLES

STUDY = """
[study]
name = "laws"
horizon = 4
seed = 3

[model]
id = "laws"
kind = "finite-state"
family = "mixture"
alphabet = 2

[[documents]]
source = "finite-state"
stratum = "all"
development = 2
evaluation = 2

[[actions]]
name = "mixture"

[plan]
baseline = "mixture"
primary = ["mismatch"]
replicates = 3
documents = 2
development_replicates = 2
draws = 100
exploratory_draws = 100
estimator = "swrb"
"""
# What differs between two runs: times, and versions and names of files that follow from them.
OF_THE_RUN = {
    "path", "prefill_seconds", "decode_seconds", "seconds", "frozen_at", "events_version", "plan_sha256", "inputs_sha256",
}  # fmt: skip


def write_laws(folder: Path) -> Path:
    """Write the study file."""
    path = folder / "laws.toml"
    path.write_text(STUDY)
    return path


def rows(store: Path) -> dict[str, list[str]]:
    """All rows, each once where it was estimated again, without what is of the run."""
    found = {}
    for table in TABLES.keys() - {"document_moments"}:  # means that results are made from, at times in two parts
        stored = Store.open(store).read(table).to_pylist()
        texts = [json.dumps({name: row[name] for name in row if name not in OF_THE_RUN}, default=str) for row in stored]
        found[table] = sorted(set(texts) if table in {"results", "calibration"} else texts)
    return found
