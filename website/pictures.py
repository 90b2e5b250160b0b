"""Draw the pictures of ``docs/quantities.md`` from the quickstart's store, and README's from the store of SmolLM2.

``python -m website.pictures stores/quickstart stores/smollm2`` writes the former to ``docs/pictures``, in the colours
of the report, light or dark as the reader's system is set, and the latter to ``docs``, as pair.svg and frontier.png.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from kvdrift.log.store import Store
from kvdrift.report.figures.canvas import (
    ACTION_COLOURS,
    INK,
    QUIET,
    RULE,
    SHADE,
    TERM_COLOURS,
    Axes,
    Figure,
    action_styles,
    drawing,
    library,
    new_figure,
    properties,
    with_properties,
)
from kvdrift.report.reading.content import read_content
from kvdrift.report.reading.estimates import StudyRows
from kvdrift.report.sections.choice import choose
from kvdrift.report.sections.frontier import bytes_figure
from kvdrift.sql.catalog import Views, open_views

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
BASELINE, OTHER = "snapkv-half", "recent-half"
ACTIONS = (BASELINE, OTHER, "snapkv-128")
STYLES = action_styles(list(ACTIONS))
WIDTH = 7.4
POOLED = {"split": "evaluation", "stratum": "pooled"}
EXAMPLE = f"""
    select tau, eos_x, eos_y, x, y, delta, f
    from (
        select doc, replicate, list(x_token order by t) as x, list(y_token order by t) as y,
            list(events.delta order by t) as delta, list(events.f order by t) as f
        from events where action = '{BASELINE}' group by doc, replicate
    )
    join trajectories using (doc, replicate)
    join documents using (doc)
    where split = 'evaluation' and task = 'needle' and action = '{BASELINE}' and complete and eos_x > 30
        and tau between 8 and 14 and mismatches between 12 and 30
    order by doc, replicate limit 1
"""  # noqa: S608 - constant text
LINE = 92  # characters
README_EXAMPLE = f"""
    select tau, eos_x, eos_y, list(x_token order by t) as x, list(y_token order by t) as y
    from events join trajectories using (study, model, doc, action, replicate)
    where doc = 'ferry-bell-label-1' and action = '{BASELINE}' and replicate = 1
        and t <= coalesce(greatest(eos_x, eos_y), horizon)
    group by tau, eos_x, eos_y
"""  # noqa: S608 - constant text


def pair(views: Views) -> Figure:
    """Draw a pair of continuations: two rows of squares, filled at mismatches, with the distances below."""
    figure = new_figure(WIDTH, 3.1)
    strip, curve = figure.subplots(2, height_ratios=(1, 1.7), sharex=True)
    (example,) = views.table(EXAMPLE).to_pylist()
    last = 48
    for t, (x, y) in enumerate(zip(example["x"], example["y"], strict=True), 1):
        for row in (0, 1):
            colour = ACTION_COLOURS[1] if x != y else RULE
            strip.add_patch(_box(t - 0.42, row + 0.1, 0.84, 0.8, colour))
    tau = example["tau"]
    strip.set(ylim=(0, 2.9), yticks=[0.5, 1.5], yticklabels=["Y, compressed", "X, full cache"], xlim=(0.4, last + 0.6))
    strip.text(tau, 2.15, f"τ = {tau}", ha="center")
    strip.text(tau + 3, 2.15, "exposure: all H − τ positions that follow →", ha="left", color=QUIET)
    _bare(strip)
    positions = range(1, len(example["delta"]) + 1)
    curve.plot(positions, example["delta"], color=ACTION_COLOURS[1], label="δ, each on its own text")
    curve.plot(positions, example["f"], color=ACTION_COLOURS[0], linestyle=(0, (5, 1.8)), label="f, both on X’s text")
    curve.axvline(tau, color=INK, linewidth=0.8)
    curve.set(xlabel="position t", ylabel="distance of the distributions", ylim=(0, 1.02))
    curve.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def pair_as_text(views: Views) -> Figure:
    """Draw README's pair as text: X above Y in lines of ``LINE`` characters, up to the later end, mismatches shaded."""
    (example,) = views.table(README_EXAMPLE).to_pylist()
    text = {row["token"]: row["text"].replace("\n", "↵") for row in views.rows("tokens").to_pylist()}
    shown = [
        ["" if end and t > end else text[token] for t, token in enumerate(tokens, 1)]
        for tokens, end in ((example["x"], example["eos_x"]), (example["y"], example["eos_y"]))
    ]
    cells: list[tuple[int, int, int]] = []  # the line of each position, its first character and its width
    line = left = 0
    for x, y in zip(*shown, strict=True):
        width = max(len(x), len(y), 1)
        if left + width > LINE:
            line, left = line + 1, 0
        cells.append((line, left, width))
        left += width
    figure = new_figure(WIDTH, 0.5 * (line + 1) + 0.1)
    axes = figure.subplots()
    for t, (x, y, (row, first, width)) in enumerate(zip(*shown, cells, strict=True), 1):
        top = line - row
        for token, height in ((x, 0.5), (y, 0.12)):
            if x != y:
                axes.add_patch(_box(first, top + height - 0.04, width, 0.36, ACTION_COLOURS[1], alpha=0.3))
            word = token.lstrip(" ")  # a viewer of SVG drops spaces at the beginning
            place = first + len(token) - len(word)
            axes.text(place, top + height + 0.14, word, va="center", family="monospace", size=7.5)
        if t == example["tau"]:
            axes.plot([first, first], [top + 0.06, top + 0.9], color=INK, linewidth=1.5)
            axes.text(first, top + 0.93, f"τ = {t}", ha="center", va="bottom", size=7)
    for row in range(line + 1):
        for side, height in (("X", 0.64), ("Y", 0.26)):
            axes.text(-1.5, row + height, side, ha="right", va="center", color=QUIET)
    axes.set(xlim=(-2, LINE), ylim=(0, line + 1.1), yticks=[], xticks=[])
    _bare(axes)
    return figure


def parts(views: Views) -> Figure:
    """Draw R = O + E · C: for each action a rectangle of width E and height C."""
    figure = new_figure(WIDTH, 2.5)
    for axes, action in zip(figure.subplots(1, 3, sharey=True), ACTIONS, strict=True):
        row = _one(views, "decomposition", action=action)
        width, height, colour = 100 * row["exposure"], 100 * row["mismatch_rate"], STYLES[action].colour
        axes.add_patch(_box(100 - width, 0, width, height, colour, alpha=0.35))
        axes.add_patch(_box(100 - width - 100 * row["occurrence"], 0, 100 * row["occurrence"], 100, TERM_COLOURS[2]))
        axes.text(100 - width / 2, height / 2, f"E · C = {width * height / 100:.1f}%", ha="center", va="center")
        axes.set(xlim=(0, 100), ylim=(0, 100), title=f"{action}: R = {100 * row['mismatch']:.1f}%")
        axes.set_xlabel(f"E = {width:.1f}% of positions")
    figure.axes[0].set_ylabel("C: share that differs, %")
    return figure


def entry(views: Views) -> Figure:
    """Draw the share of pairs that have diverged by each position."""
    figure, axes = _single(2.7)
    for action in ACTIONS:
        rows = _rows(views, "entry", action=action)
        _line(axes, action, [row["t"] for row in rows], [100 * row["entry_cdf"] for row in rows])
        mean = _one(views, "decomposition", action=action)["mean_entry"]
        axes.plot([mean], [-5], marker=STYLES[action].marker, color=STYLES[action].colour, clip_on=False)
    axes.set(xlabel="position t; the marks below: mean entry", ylabel="diverged by t, %", ylim=(-8, 102), xlim=(1, 64))
    axes.legend(loc="center right")
    return figure


def gap(views: Views) -> Figure:
    """Draw the difference in R between two actions as three terms."""
    figure, axes = _single(1.7)
    row = _one(views, "contrasts", action=OTHER, baseline=BASELINE)
    left = 0.0
    for name, colour in zip(("exposure", "rate", "occurrence"), TERM_COLOURS, strict=True):
        width = 100 * row[f"{name}_term"]
        axes.barh([0], [width], left=left, color=colour, height=0.5)
        axes.annotate(f"{name} {width:.1f}", (left + width / 2, 0.3), ha="center", va="bottom")
        left += width
    axes.set(xlabel=f"R of {OTHER} less R of {BASELINE}, percentage points", yticks=[], ylim=(-0.4, 0.75))
    return figure


def clocks(views: Views) -> Figure:
    """Draw distances by position, and by the time since the pair diverged."""
    figure = new_figure(WIDTH, 2.8)
    left, right = figure.subplots(1, 2, sharey=True)
    for action in (BASELINE, OTHER):
        rows = _rows(views, "generation_clock", action=action)
        positions, style = [row["t"] for row in rows], STYLES[action]
        _line(left, action, positions, [100 * row["delta"] for row in rows])
        left.plot(positions, [100 * row["f"] for row in rows], color=style.colour, linestyle=style.dashes, alpha=0.45)
        rows = _rows(views, "branch_clock", action=action)
        _line(right, action, [row["lag"] for row in rows], [100 * row["delta"] for row in rows])
    windows = views.rows("windows").to_pylist()[0]
    for first, last, name in (
        (1, windows["early_last"], "early"), (windows["late_first"], windows["cohort_bound"], "late")
    ):  # fmt: skip
        right.axvspan(first - 0.5, last + 0.5, color=SHADE, alpha=0.08, linewidth=0)
        right.text((first + last) / 2, 97, name, ha="center", va="top", color=QUIET)
    left.set(title="generation clock", xlabel="position t; pale: f", ylabel="mean distance, %", ylim=(0, 100))
    right.set(title="branch clock", xlabel="lag j = t − τ")
    left.legend(loc="upper right")
    return figure


def ends(views: Views) -> Figure:
    """Draw the four sets of positions around the ends of two texts, and what histories add to δ in each set."""
    figure = new_figure(WIDTH, 2.6)
    strip, bars = figure.subplots(2, height_ratios=(1, 2.2))
    for row, end in ((0, 34), (1, 24)):
        for t in range(1, 49):
            strip.add_patch(_box(t - 0.42, row + 0.1, 0.84, 0.8, RULE if t < end else INK if t == end else SHADE,
                                 alpha=0.15 if t > end else 1))  # fmt: skip
    for place, name, side in (
        (12, "0: before", "center"), (24.5, "1: first end", "right"), (25.5, "2: one has ended", "left"),
        (42, "3: both have", "center"),
    ):  # fmt: skip
        strip.text(place, 2.15, name, ha=side, color=QUIET)
    strip.set(xlim=(0.4, 48.6), ylim=(0, 2.8), yticks=[0.5, 1.5], yticklabels=["Y", "X"])
    _bare(strip)
    for place, action in enumerate(ACTIONS):
        values = [100 * row["gap"] for row in _rows(views, "eos_partition", action=action)]
        bars.bar([i + 0.25 * (place - 1) for i in range(4)], values, width=0.22, color=STYLES[action].colour,
                 label=action)  # fmt: skip
    bars.set(xticks=range(4), xlabel="set of positions", ylabel="R(TV) − F, pp")
    bars.legend(loc="upper right")
    return figure


def saturation(views: Views) -> Figure:
    """Draw a histogram of all δ."""
    figure, axes = _single(2.4)
    query = """
        select least(floor(steps.delta * 20), 19) as bin, count(*) / sum(count(*)) over () as share
        from steps join documents using (study, model, doc)
        where split = 'evaluation' and action = ? and t > 1 group by bin order by bin
    """
    relation = views.connection.sql(query, params=[BASELINE]).fetchall()
    axes.bar([5 * left + 2.5 for left, _ in relation], [100 * share for _, share in relation], width=4.5,
             color=STYLES[BASELINE].colour)  # fmt: skip
    share = 100 * _one(views, "saturation", action=BASELINE)["saturation"]
    axes.annotate(f"above 99%: {share:.1f}% of positions", (97.5, 14), (70, 40), ha="center",
                  arrowprops={"arrowstyle": "->", "color": QUIET})  # fmt: skip
    axes.set(xlabel=f"distance δ of a position, % ({BASELINE})", ylabel="positions, %", xlim=(0, 100))
    return figure


def window(views: Views) -> Figure:
    """Draw the interval of R that a window of each depth after the first mismatch leaves open."""
    figure, axes = _single(2.6)
    for action in (OTHER, BASELINE):
        rows, style = _rows(views, "identified_interval", action=action), STYLES[action]
        depths = [row["depth"] for row in rows]
        low, high = ([100 * row[end] for row in rows] for end in ("lower", "upper"))
        axes.fill_between(depths, low, high, color=style.colour, alpha=0.16, linewidth=0)
        _line(axes, action, depths, low)
        axes.plot(depths, high, color=style.colour, linestyle=style.dashes, linewidth=0.9)
    axes.set(xlabel="depth L: positions seen after the first mismatch", ylabel="R lies within, %", xlim=(1, 64))
    axes.set_ylim(0, 100)
    axes.legend(loc="upper right")
    return figure


def answers(views: Views) -> Figure:
    """Draw the share of right answers of each action, and the part that is lost."""
    figure, axes = _single(1.9)
    for place, action in enumerate(reversed(ACTIONS)):
        row = _one(views, "answers", action=action)
        lost, right = 100 * row["lost"], 100 * row["reference_right"]
        axes.barh([place], [right - lost], color=STYLES[action].colour, height=0.55)
        axes.barh([place], [lost], left=right - lost, color=RULE, height=0.55)
        axes.text(right + 1, place, f"{row['lost_share']:.0%} lost", va="center")
    axes.set(yticks=range(3), yticklabels=list(reversed(ACTIONS)), xlim=(0, 60))
    axes.set_xlabel("pairs in which X is right, %; pale: Y is not")
    axes.grid(visible=False, axis="y")
    return figure


PICTURES: dict[str, Callable[[Views], Figure]] = {
    drawn.__name__: drawn for drawn in (pair, parts, entry, gap, clocks, ends, saturation, window, answers)
}


def svg(figure: Figure) -> str:
    """Return a figure as an SVG document that is light or dark as the reader's system is set."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True)
    opening, rest = with_properties(text.getvalue()).split("<defs>", 1)
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {properties(dark=True)} }} }}"
    return f"{opening}<style>:root {{ {properties(dark=False)} }} {dark}</style>\n <defs>{rest}"


def write(store: str, folder: Path = FOLDER) -> None:
    """Draw the pictures of ``docs/quantities.md`` from the quickstart's store."""
    folder.mkdir(exist_ok=True)
    with open_views(Store.open(store)) as views, drawing():
        for name, draw in PICTURES.items():
            (folder / f"{name}.svg").write_text(svg(draw(views)), encoding="utf-8", newline="\n")


def write_readmes(store: str) -> None:
    """Draw README's pair of continuations, and its figure of bytes and R, in few colours so that the file is small."""
    with open_views(Store.open(store)) as views, drawing():
        FOLDER.with_name("pair.svg").write_text(svg(pair_as_text(views)), encoding="utf-8", newline="\n")
        (row,) = views.rows("windows").to_pylist()
        content = read_content(StudyRows(views, row["study"], row["model"]))
        figure = bytes_figure(content, choose(content))
        picture = io.BytesIO()
        figure.savefig(picture, dpi=1500 / figure.get_figwidth())
    Image.open(picture).quantize(128).save(FOLDER.with_name("frontier.png"), optimize=True)


def _rows(views: Views, view: str, **equal: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = views.rows(view, **POOLED, **equal).to_pylist()
    return rows


def _one(views: Views, view: str, **equal: Any) -> dict[str, Any]:
    (row,) = _rows(views, view, **equal)
    return row


def _single(height: float) -> tuple[Figure, Axes]:
    figure = new_figure(WIDTH, height)
    return figure, figure.subplots()


def _line(axes: Axes, action: str, x: list[int], y: list[float]) -> None:
    style = STYLES[action]
    axes.plot(x, y, color=style.colour, linestyle=style.dashes, label=action)


def _box(left: float, bottom: float, width: float, height: float, colour: str, *, alpha: float = 1.0) -> Any:
    return library().patches.Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="none", alpha=alpha)


def _bare(axes: Axes) -> None:
    """Remove frame, grid and ticks, which mean nothing beside squares or text."""
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    axes.tick_params(length=0, labelbottom=False)


if __name__ == "__main__":
    write(sys.argv[1])
    for smollm2 in sys.argv[2:]:
        write_readmes(smollm2)
