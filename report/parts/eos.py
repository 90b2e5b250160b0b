"""The section on the end of the text: where R (TV) − F lies relative to the first EOS of either side and of both."""

from __future__ import annotations

from kvdrift.report.printing.estimate_tables import EstimateColumn, action_table, action_tables, columns_of
from kvdrift.report.printing.palette import TERM_COLOURS
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.term_bars import Terms, term_drawings
from kvdrift.report.reading.content import PageContent

SETS = ("before either EOS", "at the first EOS", "one side has ended", "both have ended")
CONTRAST = ("rollout_tv_gap", "fixed_history_gap", "history_gap", "pre_eos", "eos_related", "eos_share")
TERMS = Terms(
    "history_gap",
    "eos_share",
    "EOS share",
    "difference in R (TV) − F to the baseline (percentage points)",
    (
        ("pre_eos", "before either EOS", TERM_COLOURS[0], ""),
        ("eos_related", "at or after an EOS", TERM_COLOURS[1], "////"),
    ),
)
TEMPLATE = """
{% if shown %}
<p>A side that has emitted EOS emits EOS at every later position up to the horizon. So part of the difference between the two histories is only that one answer is shorter. R (TV) − F is the sum of four parts: before either EOS (G₀), at the first EOS (G₁), while one side has ended (G₂), and after both have ended (G₃, where δ is 0).</p>
{{ table(tables.eos_partition) }}
{% if content.others %}
{% call figure("eos_terms") %}<b>Difference in R (TV) − F to {{ content.baseline }}, by place.</b> The two segments add up to the difference. The EOS share is the second segment divided by the difference; it is negative where the two have opposite signs.{% if content.estimates.have_intervals %} The line with ends is the interval of the whole difference; a share is left out where it includes 0.{% endif %}{% endcall %}
{{ table(tables.eos_contrasts) }}
{% if facts.strata | length > 1 %}
<details><summary>EOS partition in each stratum</summary>
{% call figure("eos_terms_by_stratum") %}<b>Difference in R (TV) − F to {{ content.baseline }} in each stratum, by place.</b>{% endcall %}
{{ table(tables.eos_contrasts_by_stratum, False) }}
</details>
{% endif %}
{% endif %}
{% else %}{{ absent("EOS partition") }}{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Make the section: G_0..G_3 of each action, and each contrast's EOS share; None for finite-state systems."""
    if content.facts.finite:
        return None
    shown = content.estimates.known("eos_gap")
    columns = [
        *columns_of("rollout_tv", "fixed_history_tv"),
        *(EstimateColumn("eos_gap", x, f"G{'₀₁₂₃'[x]}", meaning) for x, meaning in enumerate(SETS)),
    ]
    tables = [action_table("eos_partition", "EOS partition", content.estimates, content.actions, columns)]
    drawings: tuple[Drawing, ...] = ()
    if content.others:
        note = f"Differences to {content.baseline}. The EOS share may be negative."
        title = "EOS partition of the contrast"
        tables += action_tables("eos_contrasts", title, content, columns_of(*CONTRAST), contrasts=True, note=note)
        words = f"Difference in R − F to {content.baseline}, split into before and after an EOS"
        drawings = term_drawings("eos_terms", words, content, TERMS) if shown else ()
    return Section("eos", "Around the end of the text", TEMPLATE, tuple(tables), drawings, {"shown": shown})
