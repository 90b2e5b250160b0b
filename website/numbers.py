"""Write numbers of stores into the pages that show them: README, the quantities, and the engines.

``python -m website.numbers stores/quickstart stores/smollm2 stores/llama-cpp`` writes ``docs/numbers.json``, the
numbers by study, action and column, and puts them into the pages, in the sentences and table rows that
``numbers.toml`` lists. The numbers of studies without a store in the command stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from kvdrift.log.store import Store
from kvdrift.sql.catalog import Views, open_views

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "docs" / "numbers.json"
POOLED = {"split": "evaluation", "stratum": "pooled"}
_VIEWS = ("summary", "decomposition", "answers", "saturation", "branch_windows", "local_agreement", "contrasts")
_BASELINE = {"quickstart": "snapkv-half"}  # of the contrasts that a page shows

PAGES: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_SLOT = re.compile(r"\{(\S+) (\w+) (\S+)\}")
_SHOWN = r"((?:−?\d+(?:\.\d+)?%?(?: \[\d+, \d+\])?)?)"  # a number, a number and its interval, or nothing


def read(views: Views) -> dict[str, dict[str, float]]:
    """Return the pooled numbers of a study's evaluation documents by action and column, as far as there are numbers."""
    study = views.rows("studies").to_pylist()[0]["study"]
    baseline = {"baseline": _BASELINE[study]} if study in _BASELINE else {}
    rows: dict[str, dict[str, float]] = {}
    for view in _VIEWS:
        if view == "contrasts" and not baseline:
            continue
        equal = {"summary": {}, "contrasts": POOLED | baseline}.get(view, POOLED)
        for row in views.rows(view, **equal).to_pylist():
            kept = {name: round(value, 6) for name, value in row.items() if isinstance(value, float)}
            rows.setdefault(row["action"], {}).update(kept)
    return rows


def quoted(study: str) -> set[tuple[str, str]]:
    """Return (action, column) of every number of a study that pages show.

    If a page shows a number's interval, the columns of the interval's ends are among them.
    """
    slots = {slot for page in PAGES.values() for text in page.get(study, ()) for slot in _SLOT.findall(text)}
    ends = {
        (action, f"{column}_{end}") for action, column, form in slots if form == "interval" for end in ("low", "high")
    }
    return {(action, column) for action, column, _ in slots} | ends


def shown(row: dict[str, float], column: str, form: str) -> str:
    """Return the number in a column of a row, as a page shows it in the format ``form``; "" without a number."""
    value = row.get(column)
    if value is None:
        return ""
    text = {
        "points": lambda: f"{100 * value:.1f}",
        "percent": lambda: f"{100 * value:.1f}",
        "significant": lambda: f"{100 * value:#.2g}" if value else "0.00",
        "interval": lambda: f"{100 * value:.1f}{_ends(row, column)}",
    }.get(form, lambda: format(value, form))()
    return text.replace("-", "−")


def _ends(row: dict[str, float], column: str) -> str:
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    return "" if low is None or high is None else f" [{100 * low:.0f}, {100 * high:.0f}]"


def filled(page: str, texts: list[str], rows: dict[str, dict[str, float]]) -> str:
    """Return a page with the numbers of ``rows`` in its sentences and table rows.

    ``texts`` are these sentences and rows, with ``{action column form}`` in the place of each number.

    Raises:
        ValueError: The page does not have a text exactly once.
    """
    for text in texts:
        literal = _SLOT.split(text)[::4]
        pattern = _SHOWN.join(re.sub(r"(\\ )+", r"\\s+", re.escape(part)) for part in literal)
        (*found,) = re.finditer(pattern, page)
        if len(found) != 1:
            message = f"the page has {len(found)} texts like '{text}'; change the page or numbers.toml so that it has 1"
            raise ValueError(message)
        for group, (action, column, form) in reversed(list(enumerate(_SLOT.findall(text), 1))):
            start, end = found[0].span(group)
            page = page[:start] + shown(rows.get(action, {}), column, form) + page[end:]
    return page


def write(stores: list[str]) -> None:
    """Write the numbers of stores into ``docs/numbers.json``, and the numbers of all studies there into the pages."""
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.exists() else {}
    for store in stores:
        with open_views(Store.open(store)) as views:
            study, rows = views.rows("studies").to_pylist()[0]["study"], read(views)
        numbers[study] = {}
        for action, column in sorted(quoted(study)):
            if column in rows[action]:
                numbers[study].setdefault(action, {})[column] = rows[action][column]
    NUMBERS.write_text(f"{json.dumps(numbers, indent=1, sort_keys=True)}\n", encoding="utf-8")
    for page, studies in PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for study in studies.keys() & numbers.keys():
            text = filled(text, studies[study], numbers[study])
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
