"""Estimates of a study that still runs: made for one look, and stored nowhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.estimation import EXPLORATORY_LEVEL
from kvdrift.flows.estimate.moments import analyzed_splits, document_moments, study_windows
from kvdrift.flows.pages.reports import waiting_words, writing
from kvdrift.log.store import Store
from kvdrift.sql.catalog import Views
from kvdrift.stats.bootstrap import COLUMNS, Request, estimate
from kvdrift.stats.quantities import ANSWER_QUANTITIES, PAIR_QUANTITIES

_DRAWS = 400  # ten draws lie beyond each end at 95%; every look repeats them
_QUANTITIES = [name for name in PAIR_QUANTITIES if name not in ANSWER_QUANTITIES]  # answers are scored only at the end


@dataclass(frozen=True)
class PreliminaryViews:
    """The views of a store, with preliminary estimates from the present pairs in place of the stored estimates.

    Preliminary estimates are exploratory even if a plan names them: their documents are not yet the plan's, and
    repeated looks mislead more often than their level says.
    """

    views: Views
    study: str
    model: str

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: object) -> pa.Table:
        """Return rows of ``view`` whose columns equal the given values; for estimates always all columns."""
        if view != "estimates":
            return self.views.rows(view, columns, **equal)
        rows = self._estimates
        for name, value in equal.items():
            rows = rows.filter(pc.equal(rows[name], pa.scalar(value)))
        return rows

    @cached_property
    def _estimates(self) -> pa.Table:
        splits = analyzed_splits(self.views, self.study, self.model)
        windows = study_windows(self.views, self.study, self.model)
        parts = []
        for split in splits:
            moments = document_moments(self.views, self.study, self.model, split, windows)
            found = estimate(
                moments, draws=_DRAWS, seed=0, request=Request(EXPLORATORY_LEVEL), quantities=_QUANTITIES,
                pairs=list(itertools.permutations(moments.actions, 2)),
            )  # fmt: skip
            columns = {name: found.columns[name] for name in COLUMNS}
            constant = {"study": self.study, "model": self.model, "split": split}
            parts.append(pa.table({**{name: [value] * len(found) for name, value in constant.items()}, **columns}))
        return pa.concat_tables(parts, promote_options="permissive")


def write_preliminary(
    store: Store,
    study: str,
    model: str,
    folder: Path,
    said: str,
    *,
    token_text: Callable[[int], str] | None = None,
) -> Path:
    """Write the page of a study that still runs, with estimates of the pairs that are derived; return its path.

    ``said`` is the study's progress, as a sentence. Without ``token_text`` the examples show token ids.
    """
    from kvdrift.report.page import build_report  # noqa: PLC0415 - whether a page is there shows without what draws it
    from kvdrift.report.reading.estimates import Provenance  # noqa: PLC0415
    from kvdrift.sql.catalog import MOMENT_VIEWS, open_views  # noqa: PLC0415

    waiting = waiting_words(store, study, model)
    with writing(folder), open_views(store, kept=MOMENT_VIEWS) as views:
        return build_report(
            PreliminaryViews(views, study, model), study, model, folder,
            token_text=token_text,
            provenance=Provenance(Path(store.location).name, views.versions, waiting=waiting),
            preliminary=said,
        )  # fmt: skip


def end_preliminary(folder: Path, study: str, report: Path, store: str) -> None:
    """Replace a finished study's preliminary page by a link to its report; any other page stays.

    The report need not exist yet; ``store`` is the store's name as commands take it.
    """
    from kvdrift.report.page import RELOADING, write_ended  # noqa: PLC0415 - as below

    page = folder / "index.html"
    if page.is_file() and RELOADING in page.read_text(encoding="utf-8"):
        with writing(folder):
            write_ended(study, report, store, folder)
