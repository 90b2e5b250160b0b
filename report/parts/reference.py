"""The page's last sections: definitions of its symbols, and the origin of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from kvdrift.report.printing.section import Section
from kvdrift.report.printing.wording import capital
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import FEW_CLUSTERS
from kvdrift.report.reading.study_text import study_text
from kvdrift.schema.location import folder_name

DEFINITIONS = """
<p>X is the reference’s continuation, Y {{ facts.other }}’s continuation, and H = {{ windows.horizon }} the horizon. P and Q are their next-token laws{% if facts.other_law %}, as tokens are drawn by them: {{ facts.other_law }}{% endif %}. {% if facts.law and facts.law.greedy %}A greedy law is all on one token, so δ and f are 0 or 1, and all replicates of a document are the same. {% endif %}I<sub>t</sub> = 1 where X<sub>t</sub> ≠ Y<sub>t</sub>, and τ is the first such t. M averages over a document’s replicates, then over documents, then over strata, each with equal weight. A ratio is a ratio of such means.</p>
<dl class="facts">
<dt id="means-delta">δ<sub>t</sub></dt><dd>total variation between P given X and Q given Y, each with its own history: the probability that the tokens at t differ</dd>
<dt id="means-f">f<sub>t</sub></dt><dd>total variation between P and Q, both given X: what the action changes while the histories are the same</dd>
<dt id="means-r">R</dt><dd>disagreement: M(Σ I<sub>t</sub>) / H, or from δ: M(Σ δ<sub>t</sub>) / H. The share of positions with different tokens</dd>
<dt id="means-forced">F</dt><dd>fixed history: M(Σ f<sub>t</sub>) / H. The mean distance where {{ facts.other }} reads the reference’s text</dd>
<dt id="means-o">O</dt><dd>occurrence: M(1{τ ≤ H}) / H. What the first mismatch alone contributes</dd>
<dt id="means-e">E</dt><dd>exposure: M((H − τ) 1{τ ≤ H}) / H. The share of positions that come after the first mismatch</dd>
<dt id="means-c">C</dt><dd>mismatch rate: M(Σ<sub>t&gt;τ</sub> I<sub>t</sub>) / M((H − τ) 1{τ ≤ H}). How often tokens differ after the first mismatch; R = O + E · C exactly</dd>
<dt id="means-gap">Gap</dt><dd>ΔR = ΔO + ΔE · C̄ + ΔC · Ē, action less baseline; a bar is the mean of the two, and a share is a term divided by ΔR</dd>
{% if lags %}
<dt id="means-bound">T</dt><dd>the bound of the branch cohort, {{ windows.cohort_bound }}: continuations whose first mismatch comes by then have all lags up to {{ windows.cohort_bound }}</dd>
<dt id="means-early">Early, late</dt><dd>mean of δ at lags 1–{{ windows.early_last }} and {{ windows.late_first }}–{{ windows.cohort_bound }} after τ, among continuations with τ ≤ {{ windows.cohort_bound }}; pre-EOS counts only the steps before either side’s EOS</dd>
{% endif %}
{% if not facts.finite %}
<dt id="means-saturation">S</dt><dd>saturation: the share of positions where δ<sub>t</sub> is above {{ windows.saturation_threshold }}</dd>
{% endif %}
{% if branched %}
<dt id="means-mass">M of SWRB</dt><dd>mass of the branches of one SWRB replicate: Σ w<sub>s</sub>, where w<sub>s</sub> is the probability, along its shared prefix, that the pair diverges at s; the mean of M is P(τ ≤ H)</dd>
<dt id="means-efficiency">Efficiency</dt><dd>the variance ratio (R in a coupled pair over R in an SWRB replicate) divided by the ratio of their costs; each is a ratio of means over documents, and costs are kernel pairs evaluated, or decoding time</dd>
{% endif %}
{% if lags %}
<dt id="means-blocks">Blocks</dt><dd>{% for first, last in windows.blocks %}{{ first }}–{{ last }}{% if not loop.last %}, {% endif %}{% endfor %}</dd>
{% endif %}
<dt id="means-intervals">Intervals</dt><dd>from a bootstrap over documents within strata, with the same draws for every action; documents that share a question are one cluster and are drawn together. <em>Studentized</em>: the ends follow from the draws’ distances to the estimate, each divided by the draw’s standard error. An end is at least as far out as Student’s law puts it, and within the possible range of the quantity. <em>Skewed</em>: studentized, but a few documents decide the number, and an end was limited to 1.5 times Student’s distance. <em>Alike</em>: nearly all documents have one value, and the interval allows for unseen documents with other values. <em>Expanded</em>: percentiles of the draws, widened by Student’s t; used if standard errors vanish, over fewer than five clusters, and for shares of a gap. <em>Simultaneous</em>: intervals that hold for all pairs of actions together. <em>Percentile</em>: percentiles of the draws, as in the paper, where the plan asks for them{% if branched %}, and for residual branching{% endif %}. * marks intervals that may hold the truth less often than their level says: those from fewer than {{ few }} clusters, and skewed ones. <code>tables/estimates.csv</code> has the kind of each interval and its number of clusters</dd>
<dt>pp</dt><dd>percentage points</dd>
</dl>
"""  # noqa: E501

REPRODUCE = """
<p>{{ line }}</p>
<pre><code>{{ command }}</code></pre>
{% if text %}
<details><summary>{{ file }}, as the store knows it</summary>
<pre><code>{{ text }}</code></pre>
</details>
{% endif %}
<dl class="facts">
{% for label, text in rows %}<dt>{{ label }}</dt><dd>{{ text }}</dd>
{% endfor %}
<dt>Files</dt><dd><code>figures/</code> has every figure as SVG and PDF, and <code>tables/</code> has every table as CSV with unrounded fractions{% if content.latex %} and as LaTeX (package booktabs){% endif %}; <code>tables/estimates.csv</code> has all estimates with levels, draws and status</dd>
</dl>
"""  # noqa: E501

_ROWS = "row_multiple"  # an entry among the library versions of a unit


def definitions(content: PageContent) -> Section:
    """Make the section of the page's symbols."""
    lags = not content.facts.finite or content.windows.early_last >= 1
    branched = bool(content.residual_risks)
    values = {"lags": lags, "branched": branched, "few": FEW_CLUSTERS}
    return Section("definitions", "Definitions", DEFINITIONS, values=values)


def provenance(content: PageContent) -> Section:
    """Make the section on reproduction: the command, hashes, seed, versions and the store."""
    known, facts = content.provenance, content.facts
    made = facts.study_sha256 is not None  # false if another generator made the events
    what = [
        f"study {facts.study_sha256[:12]}" if facts.study_sha256 else "",
        f"plan {facts.plan.sha256[:12]}" if facts.plan else "",
        f"seed {facts.seed}" if facts.seed is not None else "",
        facts.other_law,
        "; ".join(facts.devices),
    ]
    line = ", ".join(part for part in what if part)
    line = f"{line}: the same file, seed and versions give the same events, and the same store the same page."
    store = known.store or "STORE"
    file = f"{folder_name(facts.study)}.toml"
    rows = [
        ("Study file SHA-256", facts.study_sha256),
        ("Plan SHA-256", facts.plan.sha256 if facts.plan else ""),
        ("Generated with", _versions({name: facts.libraries[name] for name in facts.libraries if name != _ROWS})),
        ("Batches", _batches(facts.libraries.get(_ROWS, ""))),
        ("Analyzed and drawn with", _versions(known.libraries)),
        ("Store", known.store),
        ("Table versions", _versions(known.tables)),
    ]
    values = {
        "line": capital(line),
        "command": f"kvdrift run {quote(file)} --store {quote(store)}" if made else f"kvdrift report {quote(store)}",
        "file": file,
        "text": study_text(facts),
        "rows": [row for row in rows if row[1]],
    }
    return Section("provenance", "To reproduce", REPRODUCE, values=values)


def _versions(versions: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _batches(multiple: str) -> str:
    """Say to how many rows decoding pads its batches at most; several numbers if unlike machines made units."""
    numbers = [number for number in multiple.split(", ") if number not in {"", "1"}]
    if not numbers:
        return ""
    return (
        f"padded to a multiple of {' or of '.join(numbers)} rows, or of fewer if a test of this model and machine "
        "found these to be enough, so that batch size cannot change results"
    )
