"""The lines of a prompt that state its answers, and how much of each an action keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdrift.sql.catalog import Views


_AROUND = 8  # tokens shown on either side of a record, within its line


def record_rows(
    views: Views, trajectory: Mapping[str, Any], answers: Sequence[str], text: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return what an action keeps of the records of a document's answers.

    Args:
        views: The store's views.
        trajectory: Study, model, doc and action.
        answers: The document's answers.
        text: Returns a token as text.

    Returns:
        A row for each answer with records: its number and text, the share of them that is kept, and the places, each
        with its first and last position and its line; none if the store has no prompt of the document.
    """
    names = {name: trajectory[name] for name in ("study", "model", "doc")}
    prompts = views.rows("prompts", **names, action=None).to_pylist()
    shares = views.rows("answer_records", ("answer", "kept"), **names, action=trajectory["action"]).to_pylist()
    if not prompts:
        return []
    newest = max(prompts, key=lambda row: int(row["document_revision"]))
    kept = {row["answer"]: row["kept"] for row in shares}
    rows = []
    for number, answer in enumerate(answers):
        own = [record for record in newest["records"] or () if record["answer"] == number]
        if own and number in kept:
            places = [
                {name: record[name] for name in ("first", "last")} | {"line": _line(newest["tokens"], record, text)}
                for record in own
            ]
            rows.append({"answer": number, "text": answer, "kept": kept[number], "places": places})
    return rows


def record_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how much of each answer's record is kept, and print the lines of records that lost tokens."""
    lines = []
    for row in rows:
        share = "is gone" if row["kept"] == 0 else "is kept" if row["kept"] == 1 else f"{100 * row['kept']:.0f}% kept"
        lines.append(f"record of '{row['text']}': {share}")
        if row["kept"] < 1:
            lines += [f"  at {place['first']}–{place['last']}: {place['line']}" for place in row["places"]]
    return lines


def _line(tokens: Sequence[int], record: Mapping[str, int], text: Callable[[int], str]) -> str:
    """Return a record's text and its surroundings, up to the nearest line breaks."""
    first, last = record["first"] - 1, record["last"]
    before = "".join(map(text, tokens[max(0, first - _AROUND) : first])).rpartition("\n")[2]
    after = "".join(map(text, tokens[last : last + _AROUND])).partition("\n")[0]
    said = before + "".join(map(text, tokens[first:last])) + after
    return f"… {' '.join(said.split())} …"
