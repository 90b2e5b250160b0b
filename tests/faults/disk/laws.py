"""The smallest study that has everything: laws of two tokens, both estimators."""

from __future__ import annotations

from pathlib import Path

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


def write_laws(folder: Path) -> Path:
    """Write the study file."""
    path = folder / "laws.toml"
    path.write_text(STUDY)
    return path
