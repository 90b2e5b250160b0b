"""The page from a store's real views; columns that a view lacks; and the page's imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fixtures.report_views import MODEL, STUDY, check, make_views, records

from kvdrift.report.page import build_report
from kvdrift.sql.catalog import Views


class Changed:
    """The views with a column renamed."""

    def __init__(self, views: Any, renamed: tuple[str, str]) -> None:
        self.views, self.renamed = views, renamed

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: object) -> pa.Table:
        found = self.views.rows(view, columns, **equal)
        old, new = self.renamed
        return found.rename_columns([new if name == old else name for name in found.column_names])


def test_a_page_of_real_views_has_their_numbers(views: Views, finished: Path) -> None:
    """The page is that of the command."""
    folder = finished / "report" / "small"
    check((folder / "index.html").read_text(encoding="utf-8"))
    stored = {
        (row["stratum"], row["action"], row["baseline"], row["quantity"], row["x"]): row
        for row in views.rows("estimates", study="small", split="evaluation").to_pylist()
    }
    rows = records(folder, "estimates")
    assert len(rows) == len(stored) > 500
    for row in rows:
        x = int(row["x"]) if row["x"] else None
        found = stored[row["stratum"], row["action"], row["baseline"] or None, row["quantity"], x]
        for name in ("estimate", "low", "high", "level"):
            assert (float(row[name]) if row[name] else None) == found[name]


@pytest.mark.usefixtures("undrawn")
def test_without_estimates_a_page_has_the_points_of_the_views(tmp_path: Path) -> None:
    views = make_views(analyzed=False)
    page = build_report(views, STUDY, MODEL, tmp_path).read_text(encoding="utf-8")
    assert "Intervals are missing" in page
    for view, table in (("decomposition", "decomposition"), ("branch_windows", "branch"), ("contrasts", "gap")):
        points = views.rows(view, study=STUDY, split="evaluation", stratum="pooled").to_pylist()
        assert records(tmp_path, table)
        for row in records(tmp_path, table):
            own = [
                one
                for one in points
                if (one["action"], one.get("baseline")) == (row["action"], row["baseline"] or None)
            ]
            found = [one[row["quantity"]] for one in own]
            assert [float(row["estimate"]) if row["estimate"] else None] == found


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "column", ["mean_entry", "estimate", "kept_entries", "frozen_at", "contrast_low", "moved_pairs"]
)
@pytest.mark.by_default("estimate", "moved_pairs")
def test_a_renamed_column_is_an_error_and_not_a_dash(column: str, tmp_path: Path) -> None:
    views = make_views()
    views.views["estimates"] = [row for row in views.views["estimates"] if row["quantity"] != "mean_entry"]
    with pytest.raises(KeyError, match=column):
        build_report(Changed(views, (column, "renamed")), STUDY, MODEL, tmp_path)
