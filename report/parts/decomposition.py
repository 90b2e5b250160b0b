"""The section on R and its parts: how often tokens differ, how soon the pair diverges, and how long it stays apart."""

from __future__ import annotations

from report.printing.section import Section
from report.printing.tables import action_tables, columns_of
from report.reading.content import PageContent

QUANTITIES = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "mismatch_rate", "divergence_probability",
    "mean_entry",
)  # fmt: skip
TEMPLATE = """
<h2>How much, how soon, how long</h2>
<p>R is the share of positions with different tokens. It is the share of first mismatches (O) plus the share of positions after them (E) times the mismatch rate at those positions (C): R = O + E · C. R (token) and R (TV) estimate the same quantity, the first from tokens and the second from total variation. These numbers pool the strata with equal weight.</p>
{{ table(tables.decomposition) }}
{{ by_stratum("Decomposition in each stratum", tables.decomposition_by_stratum) -}}
"""  # noqa: E501


def section(content: PageContent) -> Section:
    """R, F, O, E, C, P(τ ≤ H) and mean entry of each action."""
    tables = action_tables("decomposition", "Decomposition", content, columns_of(*QUANTITIES))
    return Section("decomposition", "Decomposition", TEMPLATE, tables)
