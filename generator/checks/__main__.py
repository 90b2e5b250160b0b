"""The second interpreter of ``generator.checks.elsewhere``: ``python -m generator.checks RESULTS THREADS``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from generator.checks.elsewhere import Decided
from generator.checks.families import tried_of

if __name__ == "__main__":
    results, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    found = [
        Decided.here(partial(
            tried_of, one["name"], one["parameters"], one["folder"] and Path(one["folder"]), one["kind"]
        ))
        for one in json.load(sys.stdin)
    ]  # fmt: skip
    Path(results).write_text(json.dumps([asdict(one) for one in found]), "utf-8")
