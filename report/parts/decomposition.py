"""The section on R and its parts: how often tokens differ, how soon the pair diverges, and how long it stays apart."""

from __future__ import annotations

import statistics

from report.printing.numbers import fixed
from report.printing.section import Section
from report.printing.tables import action_table, action_tables, columns_of
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
{% if widths %}
<p>At every position the chance of a mismatch is known, so what chance added to the tokens can be taken off again. These estimates are of the same quantities, with coefficients that development documents gave: they have the same expectation. {{ widths }}</p>
{{ table(tables.reduced) }}
{% endif %}
"""  # noqa: E501
REDUCED = ("mismatch", "exposure", "occupation", "mismatch_rate", "divergence_probability", "mean_entry")


def section(content: PageContent) -> Section:
    """R, F, O, E, C, P(τ ≤ H) and mean entry of each action."""
    tables = action_tables("decomposition", "Decomposition", content, columns_of(*QUANTITIES))
    widths, reduced = width_sentence(content), content.estimates.reduced
    if widths:
        own = action_table("reduced", "Reduced estimates", reduced, content.actions, columns_of(*REDUCED))
        tables = (*tables, own)
    return Section("decomposition", "Decomposition", TEMPLATE, tables, values={"widths": widths})


def width_sentence(content: PageContent) -> str:
    """How wide the intervals of reduced estimates are against those of the same pooled numbers; empty without any."""
    rows = [content.estimates.get(quantity, action) for quantity in REDUCED for action in content.actions]
    ratios = [
        (row.high_reduced - row.low_reduced) / (row.high - row.low)
        for row in rows
        if row.low is not None and row.high is not None and row.low_reduced is not None and row.high_reduced is not None
        and row.high > row.low
    ]  # fmt: skip
    if not ratios:
        return ""
    least, middle, most = (fixed(100 * one, 0) for one in (min(ratios), statistics.median(ratios), max(ratios)))
    return f"Their intervals are {least}% to {most}% as wide as those above, {middle}% in the middle."
