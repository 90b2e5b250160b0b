"""The sections on R and its parts, and on the positions at which the two laws share no mass."""

from __future__ import annotations

import statistics

from kvdrift.report.printing.estimate_tables import action_table, action_tables, columns_of
from kvdrift.report.printing.numbers import fixed, in_text
from kvdrift.report.printing.section import Section
from kvdrift.report.reading.content import PageContent
from kvdrift.stats.registry import Scale

_DECOMPOSITION = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "mismatch_rate", "divergence_probability",
    "mean_entry",
)  # fmt: skip
_WRITTEN = ("written", "mismatch_written", "exposure_written")
_DECOMPOSITION_PAGE = """
<p><a href="#means-r">R</a> is the share of positions with different tokens. It is the share of first mismatches (<a href="#means-o">O</a>) plus the share of positions after them (<a href="#means-e">E</a>) times the mismatch rate at those positions (<a href="#means-c">C</a>): R = O + E · C. R (token) and R (TV) estimate the same quantity, the first from tokens and the second from total variation. These numbers pool the strata with equal weight.</p>
{% if floor %}
<p>{{ floor }}</p>
{% endif %}
{{ table(tables.decomposition) }}
{{ by_stratum("Decomposition in each stratum", tables.decomposition_by_stratum) -}}
<p>R and E count all positions up to H. After both texts have ended, positions agree by construction. The written positions are only the positions up to the later end.</p>
{{ table(tables.written) }}
{% if widths %}
<details><summary>Variance-reduced estimates</summary>
<p>At every position the probability of a mismatch is known, so the noise of drawing tokens can be subtracted. These estimates have the same expectation as those above; their coefficients come from the development documents. {{ widths }}</p>
{{ table(tables.reduced) }}
</details>
{% endif %}
"""  # noqa: E501
_REDUCED = ("mismatch", "exposure", "occupation", "mismatch_rate", "divergence_probability", "mean_entry")

_MOST = 4  # actions that a sentence names

_SATURATION = ("saturation", "long_agreement", "mismatch_after_agreement")
_SATURATION_PAGE = """
{% if tables %}
<p>S is the share of positions where δ is above {{ windows.saturation_threshold }}, so that the two laws have almost nothing in common. The other two columns are shares of the branch cohort (τ ≤ {{ windows.cohort_bound }}), counted after τ and before either EOS: continuations with a run of at least {{ windows.agreement_run }} equal tokens, and continuations with a mismatch after an agreement.</p>
{{ table(tables.saturation, False) }}
{{ by_stratum("Saturation and local agreement in each stratum", tables.saturation_by_stratum) -}}
{% else %}{{ absent("saturation") }}{% endif %}
"""  # noqa: E501


def decomposition(content: PageContent) -> Section:
    """Make the section: R, F, O, E, C, P(τ ≤ H) and mean entry of each action."""
    tables = action_tables("decomposition", "Decomposition", content, columns_of(*_DECOMPOSITION))
    written = action_table(
        "written", "Over the written positions", content.estimates, content.actions, columns_of(*_WRITTEN)
    )
    tables = (*tables, written)
    widths, reduced = _width_sentence(content), content.estimates.reduced
    if widths:
        own = action_table("reduced", "Reduced estimates", reduced, content.actions, columns_of(*_REDUCED))
        tables = (*tables, own)
    return Section(
        "decomposition",
        "How much, how soon, how long",
        _DECOMPOSITION_PAGE,
        tables,
        values={"floor": _floor(content), "widths": widths},
    )


def _floor(content: PageContent) -> str:
    """Compare what repetition and rounding alone do with what the other actions do; empty without a noise floor."""
    floors = content.facts.noise_floors
    if not floors:
        return ""

    def parting(action: str) -> str:
        return f"{in_text(content.estimates.get('divergence_probability', action), Scale.PERCENT)} under {action}"

    still = [name for name in floors if content.estimates.get("rollout_tv", name).estimate == 0]
    within = f"The share of continuations that diverge within {content.windows.horizon} tokens"
    if content.facts.engine:
        each = "; ".join(f"{name} is {content.facts.described(name)}" for name in floors)
        said = f"Noise floors: {each}. {within} is {', '.join(map(parting, floors))}"
    else:
        how = "nothing is left out or coded, and the whole cache is computed another way"
        said = f"Noise floor: {how}. {within} by numerics alone is {', '.join(map(parting, floors))}"
    others = [name for name in content.actions if name not in floors]
    if len(others) > _MOST:
        known = {name: content.estimates.get("divergence_probability", name).estimate or 0.0 for name in others}
        least = min(others, key=lambda name: known[name])
        said += f"; the smallest share of the {len(others)} other actions is {parting(least)}"
    elif others:
        said += f"; {', '.join(map(parting, others))}"
    nothing = "the engine repeats itself" if content.facts.engine else "this way of computing changes nothing"
    exact = f" δ is exactly 0 under {', '.join(still)}, so {nothing}." if still else ""
    return f"{said}.{exact}"


def saturation(content: PageContent) -> Section | None:
    """Make the section on saturation and local agreement; None for finite-state systems."""
    if content.facts.finite:
        return None
    known = content.estimates.known("saturation", "long_agreement")
    title = "Saturation and local agreement"
    tables = action_tables("saturation", title, content, columns_of(*_SATURATION)) if known else ()
    return Section("saturation", "Saturation and local agreement", _SATURATION_PAGE, tables)


def _width_sentence(content: PageContent) -> str:
    """Compare the widths of reduced and plain intervals of the same pooled numbers; empty without reduced estimates."""
    rows = [content.estimates.get(quantity, action) for quantity in _REDUCED for action in content.actions]
    ratios = [
        (row.high_reduced - row.low_reduced) / (row.high - row.low)
        for row in rows
        if row.low is not None and row.high is not None and row.low_reduced is not None and row.high_reduced is not None
        and row.high > row.low
    ]  # fmt: skip
    if not ratios:
        return ""
    least, middle, most = (fixed(100 * one, 0) for one in (min(ratios), statistics.median(ratios), max(ratios)))
    return f"Their intervals are {least}% to {most}% as wide as the intervals above (median {middle}%)."
