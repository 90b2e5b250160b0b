"""The file of the trajectory explorer: it opens from ``file://`` and holds everything that it shows."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import jinja2

from kvdrift.report.explorer.outcomes import read_outcomes
from kvdrift.report.explorer.packing import pack
from kvdrift.report.explorer.prompts import read_prompts
from kvdrift.report.explorer.sample import choose
from kvdrift.report.explorer.streams import read_streams
from kvdrift.report.reading.content import PageContent

EXPLORER = "trajectories.html"

_TEMPLATES = Path(__file__).parents[1] / "templates" / "explorer"
_SCRIPTS = ("words", "packed", "overview", "score", "prompt", "explorer")
"""One after the other they are the page's script."""


def write_explorer(content: PageContent, folder: Path, token_text: Callable[[int], str] | None) -> Path | None:
    """Write ``trajectories.html`` under ``folder``; None for finite-state systems, whose tokens are no text.

    Without ``token_text`` the explorer shows numbers. The same input gives the same bytes.
    """
    if content.facts.finite:
        return None
    outcomes = read_outcomes(content)
    sample = choose(outcomes)
    streams = read_streams(content.source, outcomes, sample.rows)
    facts = content.facts
    names = {
        "study": facts.study, "model": facts.model, "split": content.split, "store": content.provenance.store,
        "other": facts.other,
    }  # fmt: skip
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    script = "".join((_TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    html = environment.get_template("explorer.html.j2").render(
        names,
        packed=pack(outcomes, sample, streams, token_text, names, read_prompts(content.source, outcomes, sample)),
        law=facts.other_law,
        engine=facts.engine,
        own_weights=facts.own_weights,
        script=script,
        # The browser runs only this script, whatever a token's text may contain.
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        style=(_TEMPLATES / "explorer.css").read_text(encoding="utf-8"),
    )
    path = folder / EXPLORER
    path.write_text(html, encoding="utf-8", newline="\n")
    return path
