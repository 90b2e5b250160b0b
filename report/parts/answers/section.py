"""The section on answers: how many right ones divergence costs, and when they are lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvdrift.report.parts.answers.records import records_sentence, records_table
from kvdrift.report.parts.verdict.contrasts import said_once, shown
from kvdrift.report.printing.canvas import Figure, action_styles, new_figure
from kvdrift.report.printing.estimate_tables import (
    CellColumn,
    EstimateColumn,
    action_tables,
    columns_of,
    contrast_rows_table,
)
from kvdrift.report.printing.numbers import count, fixed, in_text
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.strokes import WIDTH, action_legend, errors, percent_axis, round_ticks
from kvdrift.report.printing.tables import Cell, Column
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.source import ViewRow
from kvdrift.schema.study import POOLED
from kvdrift.stats.quantities import ALL_QUANTITIES
from kvdrift.stats.registry import DIFFERENCE, Scale

PLACES = ("before", "inside", "after")
_MOST = 4  # actions that the first sentence names
_FEWEST = 5  # fewest actions of a correlation
_PLACE_WORDS = {
    "before": "of right X: the pair parts before the first token of the answer",
    "inside": "of right X: it parts from the first to the last token of the answer",
    "after": "of right X: it parts after the last token of the answer",
}
TEMPLATE = """
{% if rows %}
<p><b>{{ sentence }}</b> {{ correlation }}</p>
<p>{{ basis }} The score of a continuation depends on its text up to EOS. The score is the share of the document's answers that occur in the text. If one answer is enough, the score is 1 if any answer occurs, else 0. A continuation is right if its score is 1. A right answer is lost if the reference X is right and Y is not, and gained if Y is right and X is not; the change of accuracy includes both.</p>
{{ table(tables.answers) }}
{% call figure("answers") %}<b>Right answers lost against positions that differ.</b> Each large mark is an action over all strata{% if content.estimates.have_intervals %}, with both intervals{% endif %}; small pale marks are its strata. To the right an action diverges more, and above it loses more of what the reference had right.{% endcall %}
<p class="how">The next table shows when answers are lost. It counts the pairs whose reference is right: the shares that part before, inside and after the tokens of X that state the answer, and the share of each group whose answer is lost. Up to τ both sides write the same text, so a pair that parts after the answer loses no answer.</p>
{{ table(tables.answers_when) }}
{% if tables.answer_differences is defined %}{{ table(tables.answer_differences) }}
{% endif %}
{% if tables.lost_records is defined %}<p>{{ records }}</p>
{% if losing %}<p>In the trajectory explorer, a pair that loses a right answer, above its prompt: {% for action in losing %}<a href="trajectories.html#action={{ action | urlencode }}&amp;jump=lost">{{ action }}</a>{{ "." if loop.last else ", " }}{% endfor %}</p>
{% endif %}
<p class="how">The record of an answer is the place where the prompt states the answer. If the prompt states an answer in several pieces, the piece with the smallest kept share counts. If the prompt states a piece at several places, the place with the largest kept share counts. A lost answer counts once for each pair, and the counts of all strata are added up.</p>
{{ table(tables.lost_records) }}
{% endif %}
{{ by_stratum("Answers in each stratum", tables.answers_by_stratum) -}}
{{ by_stratum("When answers are lost in each stratum", tables.answers_when_by_stratum) -}}
{% else %}
<p class="absent">The answers of {{ answered }} documents are known, and no continuation of these documents is scored yet. kvdrift analyze scores the continuations if the model's tokenizer can be loaded.</p>
{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Make the section: accuracy of both sides, lost and gained answers, and when; None if no document has answers."""
    answered = sum(bool(row["answers"]) for row in content.facts.documents if row["split"] == content.split)
    rows = content.source.of("answers", split=content.split)
    if not rows:
        values = {"rows": rows, "answered": answered}
        return Section("answers", "Does it matter?", TEMPLATE, values=values) if answered else None
    tables = [
        *action_tables("answers", "Answers", content, columns_of(
            "accuracy_reference", "accuracy", "score_gap", "lost", "gained", "lost_share"
        )),
        *action_tables("answers_when", "When answers are lost", content, _when_columns(rows)),
    ]  # fmt: skip
    differences = [f"{name}{DIFFERENCE}" for name in ("accuracy", "lost", "gained", "lost_share")]
    if content.others and content.estimates.known(*differences):
        title = f"Answers: differences to {content.baseline}"
        tables.append(
            contrast_rows_table(
                "answer_differences", title, content.estimates, differences, content.others, content.baseline
            )
        )
    lost = records_table(content)
    tables += [] if lost is None else [lost]
    words = "Share of right answers that are lost against token mismatch, one mark per action"
    drawings = (Drawing("answers", words, partial(answers_figure, content)),)
    values = {
        "rows": rows,
        "sentence": answers_sentence(content),
        "correlation": correlation_sentence(content),
        "basis": _basis_sentence(content, rows),
        "records": records_sentence(content) if lost is not None else "",
        "losing": [action for action in content.actions if content.estimates.get("lost", action).estimate],
    }
    return Section("answers", "Does it matter?", TEMPLATE, tuple(tables), drawings, values)


def answers_sentence(content: PageContent) -> str:
    """Write a sentence for each action: how accuracy changes, and how many right answers are lost and gained.

    If there are many actions, only the highest and the lowest accuracy are named.
    """
    known = [action for action in content.actions if content.estimates.get("accuracy", action).estimate is not None]
    if not known:
        return "No answer is scored."
    if len(known) > _MOST:
        accuracy = {action: content.estimates.get("accuracy", action).estimate or 0.0 for action in known}
        known = [max(known, key=lambda name: accuracy[name]), min(known, key=lambda name: accuracy[name])]
    return " ".join(_sentence(content, action) for action in known)


def _sentence(content: PageContent, action: str) -> str:
    """Write, for example, ``With snapkv-half, accuracy is 61.0% instead of 80.0%: −19.0 pp [−25.1, −12.2]. …``"""
    names = ("accuracy", "accuracy_reference", "score_gap", "lost", "gained", "lost_share")
    found = {name: content.estimates.get(name, action) for name in names}
    points = {name: in_text(replace(row, low=None), ALL_QUANTITIES[name].scale) for name, row in found.items()}
    change = shown(found["score_gap"], Scale.POINTS)
    told = f"With {action}, accuracy is {points['accuracy']} instead of {points['accuracy_reference']}: {change}."
    if found["lost_share"].estimate is None:
        return f"{told} The reference is never right, so no right answer can be lost; {points['gained']} are gained."
    share = shown(found["lost_share"], Scale.PERCENT)
    return said_once(
        f"{told} Right answers are lost in {points['lost']} of pairs and gained in {points['gained']}; of the "
        f"reference’s right answers {share} are lost."
    )


def correlation_sentence(content: PageContent) -> str:
    """Write the correlation of R with lost answers over the actions; empty with fewer than ``_FEWEST`` actions."""
    rows = content.pooled("answer_correlations")
    if not rows or rows[0]["lost"] is None or rows[0]["actions"] < _FEWEST:
        return ""
    (row,) = rows
    return (
        f"Over the {row['actions']} actions, the correlation of R with answers lost is {fixed(row['lost'], 2)}, "
        f"and with the score gap {fixed(row['score_gap'], 2)}."
    )


def answers_figure(content: PageContent) -> Figure:
    """Draw the share of right answers that are lost against R, for each action and stratum."""
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    styles = action_styles(content.actions)
    for action, style in styles.items():
        for stratum in (*content.facts.strata, POOLED):
            risk, lost = (content.estimates.get(name, action, stratum=stratum) for name in ("mismatch", "lost_share"))
            if risk.estimate is None or lost.estimate is None:
                continue
            x, y = [100 * risk.estimate], [100 * lost.estimate]
            if stratum == POOLED:
                axes.errorbar(x, y, xerr=errors(risk), yerr=errors(lost), fmt=style.marker, color=style.colour,
                              markersize=7, linewidth=1.2, capsize=2.5, zorder=3)  # fmt: skip
            else:
                axes.plot(x, y, linestyle="none", marker=style.marker, color=style.colour, markersize=4, alpha=0.35)
    percent_axis(axes, "right answers lost (%)")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlim(left=0)
    round_ticks(axes.xaxis)
    axes.set_xlabel("R (token): positions with different tokens (%)")
    action_legend(figure, styles, marker=True)
    return figure


def _when_columns(rows: list[ViewRow]) -> list[EstimateColumn | CellColumn]:
    columns = list[EstimateColumn | CellColumn]()
    for place in PLACES:
        cells = {
            (row["stratum"], row["action"]): Cell(fixed(100 * row[place], 1)) for row in rows if row[place] is not None
        }
        columns.append(CellColumn(Column(f"τ {place}", "%", _PLACE_WORDS[place]), cells))
        columns.append(EstimateColumn(f"lost_{place}"))
    return columns


def _basis_sentence(content: PageContent, rows: list[ViewRow]) -> str:
    """Say how many documents are scored."""
    pooled = [row for row in rows if row["stratum"] == POOLED and row["action"] in content.actions]
    total = content.facts.count(content.split)
    scored = max((row["documents"] for row in pooled), default=0)
    without = f"; the rest ({count(total - scored)}) is not scored" if scored < total else ""
    return f"{count(scored)} of {count(total)} {content.split} documents have known answers{without}."
