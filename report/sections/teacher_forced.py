"""The section with KL and agreement of the most probable token, which tools give that force the reference's text."""

from __future__ import annotations

from kvdrift.report.printing.estimate_tables import action_tables, columns_of
from kvdrift.report.reading.content import PageContent
from kvdrift.report.sections.findings import span
from kvdrift.report.sections.section import Section

_FORCED = (
    "kl_fixed_history", "kl_fixed_history_p99", "kl_infinite", "top1_agreement", "fixed_history_tv", "mismatch", "kl",
)  # fmt: skip


def section(content: PageContent) -> Section | None:
    """Make the section; None if no event has a KL divergence."""
    if not content.estimates.known("top1_agreement"):
        return None
    tables = action_tables("teacher_forced", "Teacher-forced distances", content, columns_of(*_FORCED))
    shows = span(content, {"kl_fixed_history": "Mean KL along X", "mismatch": "R"})
    return Section("teacher-forced", "What teacher-forced tools would say", tables, shows=shows)
