"""HTML from the templates of this package: values are escaped unless a template marks them as safe."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2

from kvdrift.report.figures.canvas import properties

_TEMPLATES = Path(__file__).parents[1] / "templates"


def rendered(template: str, **values: Any) -> str:
    """Return a template's HTML; ``template`` is its path below ``templates``, without ``.html.j2``."""
    return _environment().get_template(f"{template}.html.j2").render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals["colours"] = [properties(dark=dark) for dark in (False, True)]
    return environment
