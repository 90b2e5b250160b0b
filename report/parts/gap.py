"""The section on the gap in R to the baseline: its terms, and paired differences of other quantities."""

from __future__ import annotations

from dataclasses import replace

from kvdrift.report.printing.estimate_tables import action_tables, columns_of, contrast_rows_table
from kvdrift.report.printing.numbers import MISSING, fixed
from kvdrift.report.printing.palette import TERM_COLOURS
from kvdrift.report.printing.section import Section
from kvdrift.report.printing.tables import Cell, PrintedTable, TableRow
from kvdrift.report.printing.term_bars import Terms, term_drawings
from kvdrift.report.reading.content import PageContent
from kvdrift.schema.study import POOLED
from kvdrift.stats.quantities import QUANTITIES
from kvdrift.stats.registry import DIFFERENCE

GAP = ("gap", "occurrence_term", "exposure_term", "rate_term", "occurrence_share", "exposure_share", "rate_share")
TERMS = Terms(
    "gap",
    "exposure_share",
    "exposure share",
    "gap in token mismatch to the baseline (percentage points)",
    (
        ("exposure_term", "exposure: apart longer", TERM_COLOURS[0], ""),
        ("rate_term", "rate: apart more often", TERM_COLOURS[1], "////"),
        ("occurrence_term", "occurrence: first mismatch", TERM_COLOURS[2], ""),
    ),
)
TEMPLATE = """
{% if shown %}
{% call figure("gap_terms") %}<b>Gap in R to {{ content.baseline }}, and its terms.</b> The segments of a bar add up to the gap: exposure (the pair is apart for longer), rate (tokens differ more often while the pair is apart), and occurrence (the first mismatch itself). Negative terms go to the left of zero.{% if content.estimates.have_intervals %} The line with ends is the interval of the whole gap; segments and shares are points. A share is left out where that interval includes 0.{% endif %}{% endcall %}
<p class="how">Each share is a term divided by ΔR, so the three shares add up to 100%. Where one share is above 100%, another term is negative.{% if content.estimates.have_intervals %} Shares are left out where the interval of ΔR includes 0.{% endif %}</p>
{{ table(tables.gap) }}
{% if tables.differences is defined %}
<details><summary>Other differences to {{ content.baseline }}</summary>
<p class="how">A difference is paired: both actions are measured on the same documents. Where its interval excludes 0, the two actions differ.</p>
{{ table(tables.differences) }}
</details>
{% endif %}
{% if facts.strata | length > 1 %}
<p>{{ exposure }}</p>
<details><summary>The gap in each stratum</summary>
{% call figure("gap_terms_by_stratum") %}<b>Gap in R to {{ content.baseline }} in each stratum, and its terms.</b>{% endcall %}
{{ table(tables.gap_by_stratum, False) }}
</details>
{% endif %}
{% else %}{{ absent("gaps") }}{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Make the section: the gap of each other action, its terms and their shares; None without another action."""
    if not content.others:
        return None
    estimates, baseline = content.estimates, content.baseline
    note = f"Differences to {baseline}."
    made = action_tables("gap", f"Gap to {baseline}", content, columns_of(*GAP), contrasts=True, note=note)
    tables = [_with_shares_of_gaps(table, content) for table in made]
    differences = sorted(
        {row.quantity for row in estimates.all() if row.baseline == baseline and row.stratum == POOLED}
        & {name for name in QUANTITIES if name.endswith(DIFFERENCE)}
    )
    if differences:
        title = f"Other differences to {baseline}"
        tables.append(contrast_rows_table("differences", title, estimates, differences, content.others, baseline))
    shown = estimates.known("gap")
    words = f"Gap in token mismatch to {baseline}, split into exposure, rate and occurrence"
    drawings = term_drawings("gap_terms", words, content, TERMS) if shown else ()
    values = {"shown": shown, "exposure": exposure_sentence(content)}
    return Section("gap", "What the gap is made of", TEMPLATE, tuple(tables), drawings, values)


def _with_shares_of_gaps(table: PrintedTable, content: PageContent) -> PrintedTable:
    """Blank the shares of gaps that may be 0; the CSV file keeps them."""
    first = 1 + GAP.index("occurrence_share")

    def cells(row: TableRow) -> tuple[Cell, ...]:
        gap = content.estimates.get("gap", row.cells[0].text, content.baseline, stratum=row.group or POOLED)
        if gap.excludes_zero() or not gap.has_interval:
            return row.cells
        return (*row.cells[:first], *(Cell(MISSING) for _ in row.cells[first:]))

    return replace(table, rows=tuple(replace(row, cells=cells(row)) for row in table.rows))


def exposure_sentence(content: PageContent) -> str:
    """Say in how many decompositions by stratum exposure is the larger part, and give the range of its share.

    If there are intervals, only gaps whose interval excludes 0 are counted: a share of a gap that may be 0 says
    nothing.
    """
    places = [(action, stratum) for action in content.others for stratum in content.facts.strata]
    gaps = {place: content.estimates.get("gap", place[0], content.baseline, stratum=place[1]) for place in places}
    clear = [place for place, gap in gaps.items() if gap.excludes_zero() or not gap.has_interval]
    shares = [
        content.estimates.get("exposure_share", action, content.baseline, stratum=stratum).estimate
        for action, stratum in clear
    ]
    known = [share for share in shares if share is not None]
    if not known:
        return ""
    which = "" if len(clear) == len(places) else " whose interval of the gap excludes 0"
    low, high = (fixed(100 * share, 1) for share in (min(known), max(known)))
    return (
        f"Exposure is more than half of the gap in {sum(share > 0.5 for share in known)} of {len(known)} combinations "
        f"of stratum and contrast{which}; its share ranges from {low}% to {high}%."
    )
