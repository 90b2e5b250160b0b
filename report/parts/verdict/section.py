"""The first section: a row for each action, the recommendation, the ranked table, and bytes against divergence."""

from __future__ import annotations

from functools import partial

from kvdrift.report.parts.verdict.choice import choose
from kvdrift.report.parts.verdict.contrasts import sentences
from kvdrift.report.parts.verdict.frontier import (
    bits_sentences,
    bytes_figure,
    frontier_sentence,
    has_bytes,
    policies_sentence,
)
from kvdrift.report.parts.verdict.glance import glance_table
from kvdrift.report.parts.verdict.ranking import ranked_table
from kvdrift.report.parts.verdict.recommendation import recommendation
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.wording import counted
from kvdrift.report.reading.content import PageContent

VERDICT = """
{{ table(tables.glance) }}
<p class="lead">{{ said.lead }}</p>
{% for sentence in said.reasons %}
<p class="detail">{{ sentence }}</p>
{% endfor %}
{% if endless %}
<p class="detail"><b>No text ended.</b> {{ endless }}</p>
{% endif %}
{% if said.settles %}
<p class="detail"><b>What would {{ "settle" if said.open else "confirm" }} it.</b> {{ said.settles | join(" ") }}</p>
{% endif %}
{% if content.estimates.have_intervals %}
<p class="detail">Brackets hold intervals. After them stand the level and the status: prespecified (the plan named the estimate before anyone had seen its outcome), seen (the plan named it when its outcome was known) or exploratory (not planned beforehand). Ends have the digits that resampling is sure of: another seed moves an end by less than one unit of its last digit in 19 of 20 cases.</p>
{% endif %}
{% if said.pairs %}
<details><summary>The pairs that are not told apart, and what would settle each</summary>
{% for pair in said.pairs %}
<p class="detail">{{ pair }}</p>
{% endfor %}
</details>
{% endif %}
{{ table(tables.ranking) }}
{% if figures.bytes is defined %}
{% call figure("bytes") %}<b>Bytes against divergence.</b> To the left an action holds fewer bytes, and further down it diverges less.{% if content.estimates.have_intervals %} Bars are intervals of R, one action at a time; the verdict rests on intervals of differences, which are narrower if both are measured on the same documents{% if content.estimates.pairs > 1 %}, and hold for all pairs of actions together{% endif %}.{% endif %} Actions that hold the same bytes stand side by side.{% if frontier %} {{ frontier }}{% endif %}{% if policies %} {{ policies }}{% endif %}{% endcall %}
{% for sentence in bits %}
<p class="detail">{{ sentence }}</p>
{% endfor %}
{% endif %}
"""  # noqa: E501
CONTRASTS = """
{% for sentence in sentences if not sentence.added %}
<p>{{ sentence.lead }}</p>
<p class="detail">{{ sentence.detail }}{% if not sample %} {{ sentence.sample }}{% endif %}</p>
{% endfor %}
{% for sentence in sentences if sentence.added %}
{% if loop.first %}<div class="added">
<p class="detail">Exploratory, of actions that were added after the plan was frozen:</p>
{% endif %}
<p>{{ sentence.lead }}</p>
<p class="detail">{{ sentence.detail }}{% if not sample %} {{ sentence.sample }}{% endif %}</p>
{% if loop.last %}</div>
{% endif %}
{% endfor %}
{% if sample %}
<p class="detail">{{ sample }}</p>
{% endif %}
"""


def section(content: PageContent) -> Section:
    """Make the section with each action at a glance, the recommendation, and the ranked actions."""
    choice = choose(content)
    tables = (glance_table(content, choice), ranked_table(content, choice))
    words = "R of each action against the bytes of its cache"
    drawn = not content.facts.finite and has_bytes(content)
    drawings = (Drawing("bytes", words, partial(bytes_figure, content, choice)),) if drawn else ()
    values = {
        "said": recommendation(content, choice),
        "frontier": frontier_sentence(content, choice) if drawn else "",
        "policies": policies_sentence(content),
        "endless": _endless(content),
        "bits": bits_sentences(content),
    }
    return Section("verdict", "Verdict", VERDICT, tables, drawings, values)


def _endless(content: PageContent) -> str:
    """Say that no text ended although a chat template was applied; empty otherwise."""
    ended, texts = content.ended
    if not content.facts.has_chats or ended or not texts:
        return ""
    return (
        f"A chat template was applied, and none of {counted(texts, 'continuation')} X ended within H = "
        f"{content.windows.horizon} tokens. Either answers are longer, or the tokens that end a text lack the one by "
        "which this model ends an answer: then positions after the answer count as text. kvdrift run --dry-run names "
        "the tokens, and eos under [study] chooses them."
    )


def contrasts(content: PageContent) -> Section:
    """Make the section with a sentence on each action; documents shared by all sentences are named once."""
    said = sentences(content)
    samples = {sentence.sample for sentence in said}
    values = {"sentences": said, "sample": said[0].sample if len(samples) == 1 else ""}
    return Section("actions-in-words", "In words", CONTRASTS, values=values)
