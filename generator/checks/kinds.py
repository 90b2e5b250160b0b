"""Find out whether a name is a selector, a codec or a policy.

``python -m kvdrift.generator.checks.kinds RESULTS THREADS`` is the second interpreter of ``decide_elsewhere``. It
writes the decisions of the parts that standard input names to the file RESULTS, and computes with THREADS threads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvdrift.generator.checks.codecs import CodecTrial
from kvdrift.generator.checks.policies import PolicyTrial
from kvdrift.generator.checks.selectors import SelectorTrial
from kvdrift.generator.checks.trial import Trial, decisions_of
from kvdrift.generator.selectors.parameters import Value
from kvdrift.schema.errors import InputError, nearest

_TRIALS: dict[str, type[Trial[Any]]] = {trial.kind.noun: trial for trial in (SelectorTrial, CodecTrial, PolicyTrial)}


def trial_of(name: str, parameters: Mapping[str, Value], folder: Path | None, noun: str | None = None) -> Trial[Any]:
    """Return a selector, codec or policy, ready for its checks.

    The name is that of a part of kvdrift or of an entry point, or ``module:Class``; modules are found in ``folder``
    first. ``noun``, "selector", "codec" or "policy", is needed if the name stands for several of them. Parameters are
    those that differ from the defaults.
    """
    if noun is not None and noun not in _TRIALS:
        raise InputError(f"--kind {noun}: {nearest(noun, _TRIALS)}")
    return _TRIALS[_noun_of(name, folder) if noun is None else noun](name, parameters, folder)


def _noun_of(name: str, folder: Path | None) -> str:
    """Return the kind that a name belongs to; an unknown name is treated as a selector's, which refuses it."""
    kinds = {noun: trial.kind for noun, trial in _TRIALS.items()}
    having = [noun for noun, kind in kinds.items() if name in kind.known or name in kind.entry_points]
    if len(having) > 1:
        ways = " or ".join(f"--kind {noun}" for noun in having)
        raise InputError(f"'{name}' is the name of a {' and of a '.join(having)}; write {ways}")
    if having:
        return having[0]
    for noun in ("codec", "policy"):
        try:
            kinds[noun].find(name, folder)
        except InputError:
            continue
        return noun
    return "selector"


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    made = (
        partial(trial_of, entry["name"], entry["parameters"], entry["folder"] and Path(entry["folder"]), entry["kind"])
        for entry in json.load(sys.stdin)
    )
    Path(sys.argv[1]).write_text(json.dumps([decisions_of(make) for make in made]), "utf-8")
