"""The section on saturated positions and on agreement after the first mismatch."""

from __future__ import annotations

from report.printing.section import Section
from report.printing.tables import action_tables, columns_of
from report.reading.content import PageContent

QUANTITIES = ("saturation", "long_agreement", "mismatch_after_agreement")
TEMPLATE = """
<h2>Saturation and local agreement</h2>
{% if tables %}
<p>S is the share of positions where δ is above {{ windows.saturation_threshold }}, so that the two laws have almost nothing in common. The other two columns are shares of the branch cohort (τ ≤ {{ windows.cohort_bound }}), counted after τ and before either EOS: continuations with a run of at least {{ windows.agreement_run }} equal tokens, and continuations with a mismatch after an agreement.</p>
{{ table(tables.saturation, False) }}
{{ by_stratum("Saturation and local agreement in each stratum", tables.saturation_by_stratum) -}}
{% else %}{{ absent("saturation") }}{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Saturation and local agreement of each action; finite-state systems have no such section."""
    if content.facts.finite:
        return None
    known = content.estimates.known("saturation", "long_agreement")
    title = "Saturation and local agreement"
    tables = action_tables("saturation", title, content, columns_of(*QUANTITIES)) if known else ()
    return Section("saturation", "Saturation", TEMPLATE, tables)
