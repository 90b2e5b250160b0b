"""Find out whether a name is a selector, a codec or a policy, and choose its checks.

``python -m kvdrift.generator.checks.families RESULTS THREADS`` is the second interpreter of
``kvdrift.generator.checks.elsewhere``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvdrift.generator.actions import CODEC_KIND
from kvdrift.generator.checks.codecs import CODEC_CHECKS, CodecSubject
from kvdrift.generator.checks.elsewhere import Decided
from kvdrift.generator.checks.policies import POLICY_CHECKS, PolicySubject
from kvdrift.generator.checks.selectors import CHECKS
from kvdrift.generator.checks.subject import Subject
from kvdrift.generator.checks.tried import Check, Tried
from kvdrift.generator.codecs import CODECS
from kvdrift.generator.selectors import SELECTORS
from kvdrift.generator.selectors.own.kinds import SELECTOR_KIND, PartKind
from kvdrift.generator.selectors.own.names import entry_point_names, own_class
from kvdrift.generator.selectors.parameters import Value
from kvdrift.generator.selectors.policies import POLICIES, POLICY_KIND
from kvdrift.schema.errors import InputError, nearest


@dataclass(frozen=True)
class _Checked:
    """A family of parts: selectors, codecs or policies, with the package's classes and the way to try a part."""

    kind: PartKind[Any]
    known: Mapping[str, type[Any]]
    subject: type[Tried[Any]]
    checks: tuple[Check[Any], ...]

    def has(self, name: str) -> bool:
        """Tell whether a class of the package or an entry point has the name."""
        return name in self.known or name in entry_point_names(self.kind)

    def finds(self, name: str, folder: Path | None) -> bool:
        """Tell whether a name stands for a user's class of this family."""
        try:
            own_class(self.kind, name, folder, self.known)
        except InputError:
            return False
        return True


_FAMILIES = {
    "selector": _Checked(SELECTOR_KIND, SELECTORS, Subject, CHECKS),
    "codec": _Checked(CODEC_KIND, CODECS, CodecSubject, CODEC_CHECKS),
    "policy": _Checked(POLICY_KIND, POLICIES, PolicySubject, POLICY_CHECKS),
}


def tried_of(name: str, parameters: Mapping[str, Value], folder: Path | None, kind: str | None = None) -> Tried[Any]:
    """Return a selector, codec or policy, ready for its checks.

    The name is one of the package, an entry point's, or ``module:Class``, whose modules are found in ``folder`` first.
    ``kind`` is "selector", "codec" or "policy" if the name stands for several of them. Parameters are those that differ
    from the defaults.
    """
    return _FAMILIES[_kind_of(name, folder) if kind is None else _known(kind)].subject(name, parameters, folder)


def checks_of(tried: Tried[Any]) -> tuple[Check[Any], ...]:
    """Return the checks of a part."""
    return _FAMILIES[tried.kind].checks


def _known(kind: str) -> str:
    if kind not in _FAMILIES:
        raise InputError(f"--kind {kind}: {nearest(kind, _FAMILIES)}")
    return kind


def _kind_of(name: str, folder: Path | None) -> str:
    """Return the family that a name belongs to; an unknown name is treated as a selector's, which refuses it."""
    having = [kind for kind, one in _FAMILIES.items() if one.has(name)]
    if len(having) > 1:
        ways = " or ".join(f"--kind {kind}" for kind in having)
        raise InputError(f"'{name}' is the name of a {' and of a '.join(having)}; write {ways}")
    if not having:
        having = [kind for kind, one in _FAMILIES.items() if kind != "selector" and one.finds(name, folder)]
    return having[0] if having else "selector"


def _answer(results: Path, threads: int) -> None:
    """Write the decisions in this interpreter of the parts that standard input names."""
    torch.set_num_threads(threads)
    made = (
        partial(tried_of, one["name"], one["parameters"], one["folder"] and Path(one["folder"]), one["kind"])
        for one in json.load(sys.stdin)
    )
    results.write_text(json.dumps([asdict(Decided.here(make)) for make in made]), "utf-8")


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), int(sys.argv[2]))
