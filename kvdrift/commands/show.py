"""``kvdrift show``: print one trajectory as text, the reference beside the compressed model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift import completion
from kvdrift.options import ModelOption, StoreArgument, StudyOption
from kvdrift.schema.errors import InputError, printable, similar_name
from kvdrift.schema.token_texts import BYTE, shown_texts, whole_texts

if TYPE_CHECKING:
    import pyarrow as pa

    from kvdrift.sql.catalog import Views


_PAIR = ("study", "model", "doc", "action", "action_revision", "replicate")
_OF_DOCUMENT = ("split", "stratum", "task", "answers")
_AROUND = 8  # most tokens of the record's line that are shown on either side of a record
_SHOWN = ("t", "x_token", "y_token", "delta", "f", "x_eos", "y_eos")


def show(
    store: StoreArgument,
    doc: Annotated[
        str,
        typer.Argument(
            metavar="DOC", help="The document's id.", autocompletion=completion.of_store("documents", "doc")
        ),
    ],
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION", help="The action's name.", autocompletion=completion.of_store("actions", "action")
        ),
    ],
    replicate: Annotated[
        int, typer.Argument(metavar="REPLICATE", min=0, help="The number of the coupled pair, from 0.")
    ] = 0,
    study: StudyOption = None,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Print a trajectory: both tokens of each position as text, the mismatches, and the distances delta and f.

    For a document with answers, it also prints how much the action keeps of the places where the prompt states an
    answer, and the lines of those places that lost tokens.

    The texts of tokens are those of the store, or of the model's tokenizer. If the store has none yet and the tokenizer
    is not found from this folder, tokens are printed as numbers. A character of several tokens stands at the last of
    them; the others are their bytes in hexadecimal.

    Examples:
        kvdrift show stores/quickstart needle-384-00000 snapkv-half 0
    """
    from kvdrift.formats import print_table
    from kvdrift.log.store import Store
    from kvdrift.log.studies import chosen_study, model_revisions
    from kvdrift.schema.study.described import described_action
    from kvdrift.sql.catalog import open_views

    opened = Store.open(store)
    study, model = chosen_study(opened, study, model)
    revision = model_revisions(opened).get((study, model))
    with open_views(opened) as views:
        trajectory = _trajectory(views, study, model, doc, action, replicate)
        pair = {name: trajectory[name] for name in _PAIR}
        positions = views.rows("events", _SHOWN, **pair, kind="coupled").to_pylist()
        text = _token_text(views, study, model, revision)
        declared = views.rows("actions", study=study, action=action).to_pylist()
        records = _record_rows(views, trajectory, trajectory["answers"] or (), text)
    trajectory |= {"does": next(map(described_action, declared), "")}
    for side in ("x", "y"):
        texts = shown_texts([text(position[f"{side}_token"]) for position in positions])
        for position, shown in zip(positions, texts, strict=True):
            position[f"{side}_text"] = shown
    if as_json:
        typer.echo(json.dumps(trajectory | {"records": records, "positions": positions}, ensure_ascii=False))
        return
    for line in (*_summary(trajectory), *_record_lines(records)):
        typer.echo(printable(line))
    print_table(_table(trajectory, positions))


def _token_text(views: Views, study: str, model: str, revision: str | None) -> Callable[[int], str]:
    """Return a function from a token to its text in the store; without texts there, in the model's tokenizer.

    The tokenizer is not always here: a model's id may be a path from the study file's folder. A token without a text is
    its number.
    """
    from kvdrift.generator.transformer.files.tokenizer import token_reader

    rows = views.rows("tokens", ("token", "text"), study=study, model=model)
    texts = dict(zip(rows["token"].to_pylist(), rows["text"].to_pylist(), strict=True))
    if not texts:
        return token_reader(model, revision=revision) or str
    return lambda token: texts.get(token) or str(token)


def _trajectory(views: Views, study: str, model: str, doc: str, action: str, replicate: int) -> dict[str, Any]:
    """Find a trajectory's row, and add the columns of its document."""
    keys: dict[str, Any] = {"study": study, "model": model}
    for name, requested in (("doc", doc), ("action", action), ("replicate", replicate)):
        known = views.rows("trajectories", (name,), **keys)[name].unique().to_pylist()
        if not known:
            raise InputError(f"study '{study}' has no trajectories yet; kvdrift derive makes them of its events")
        if requested not in known:
            raise InputError(f"{name.upper()} {requested}: no such trajectory; {_nearest(requested, sorted(known))}")
        keys[name] = requested
    trajectory = max(views.rows("trajectories", **keys).to_pylist(), key=lambda row: int(row["action_revision"]))
    (document,) = views.rows("documents", _OF_DOCUMENT, study=study, model=model, doc=doc).to_pylist() or [{}]
    return {**trajectory, **dict.fromkeys(_OF_DOCUMENT), **document}


def _nearest(requested: str | int, known: Sequence[Any]) -> str:
    """Return a hint at known values: the range of numbers, the name nearest to ``requested``, or some names."""
    if isinstance(requested, int):
        return f"there are {known[0]} to {known[-1]}"
    near = similar_name(requested, known)
    return f"did you mean '{near}'?" if near else f"there are {', '.join(known[:5])}{', …' * (len(known) > 5)}"


def _summary(row: Mapping[str, Any]) -> list[str]:
    part = " ".join(str(row[name]) for name in ("split", "stratum") if row[name] is not None)
    where = f"{row['study']}, {row['model']}: {row['doc']}{f' ({part})' if part else ''}"
    met = "no mismatch" if row["tau"] is None else f"first mismatch at {row['tau']}, {row['mismatches']} in all"
    story = [f"{row['horizon']} positions", met]
    story += [f"EOS of the reference at {row['eos_x']}"] * (row["eos_x"] is not None)
    story += [f"EOS of the compressed model at {row['eos_y']}"] * (row["eos_y"] is not None)
    action = f"{row['action']} ({row['does']})" if row["does"] else row["action"]
    lines = [f"{where}, {action}, replicate {row['replicate']}", "; ".join(story)]
    return [*lines, f"answers: {', '.join(row['answers'])}"] if row["answers"] else lines


def _table(trajectory: Mapping[str, Any], positions: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the positions up to the last EOS; after its own EOS a side's text is empty."""
    import pyarrow as pa

    ends = (trajectory["eos_x"], trajectory["eos_y"])
    last = trajectory["horizon"] if None in ends else max(ends)
    shown = [row for row in positions if row["t"] <= last]
    columns: dict[str, list[Any]] = {"t": [row["t"] for row in shown]}
    for name, side, end in (("reference", "x", ends[0]), ("compressed", "y", ends[1])):
        columns[name] = ["" if end is not None and row["t"] > end else _visible(row[f"{side}_text"]) for row in shown]
    columns[""] = [_mark(row, trajectory["tau"]) for row in shown]
    columns |= {name: [f"{row[name]:.4f}" for row in shown] for name in ("delta", "f")}
    return pa.table(columns)


def _mark(row: Mapping[str, Any], tau: int | None) -> str:
    if row["x_token"] == row["y_token"]:
        return ""
    return "≠ τ" if row["t"] == tau else "≠"


def _visible(text: str) -> str:
    """Return a token's text with Python's escapes, in quotes if it is empty or begins or ends with white space."""
    escaped = re.sub(rf"\\({BYTE})", r"\1", repr(text))  # bytes of tokens are escapes already
    return escaped if text != text.strip() or not text else escaped[1:-1]


def _record_rows(
    views: Views, trajectory: Mapping[str, Any], answers: Sequence[str], text: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return a row for each answer with records: the share that the action keeps, and the records' places and lines.

    A record is a place where the prompt states the answer. There are no rows if the store lacks the prompt.
    """
    names = {name: trajectory[name] for name in ("study", "model", "doc")}
    prompts = views.rows("prompts", **names, action=None).to_pylist()
    shares = views.rows("answer_records", ("answer", "kept"), **names, action=trajectory["action"]).to_pylist()
    if not prompts:
        return []
    newest = max(prompts, key=lambda row: int(row["document_revision"]))
    kept = {row["answer"]: row["kept"] for row in shares}
    whole = whole_texts([text(token) for token in newest["tokens"]])
    rows = []
    for number, answer in enumerate(answers):
        answer_records = [record for record in newest["records"] or () if record["answer"] == number]
        if answer_records and number in kept:
            places = [
                {name: record[name] for name in ("first", "last")} | {"line": _line(whole, record)}
                for record in answer_records
            ]
            rows.append({"answer": number, "text": answer, "kept": kept[number], "places": places})
    return rows


def _record_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on the kept share of each answer's record, with the text of records that lost tokens."""
    lines = []
    for row in rows:
        share = "is gone" if row["kept"] == 0 else "is kept" if row["kept"] == 1 else f"{100 * row['kept']:.0f}% kept"
        lines.append(f"record of '{row['text']}': {share}")
        if row["kept"] < 1:
            lines += [f"  at {place['first']}–{place['last']}: {place['line']}" for place in row["places"]]
    return lines


def _line(texts: Sequence[str], record: Mapping[str, int]) -> str:
    """Return a record's text and its surroundings, up to the nearest line breaks, of the texts of a prompt's tokens."""
    first, last = record["first"] - 1, record["last"]
    before = "".join(texts[max(0, first - _AROUND) : first]).rpartition("\n")[2]
    after = "".join(texts[last : last + _AROUND]).partition("\n")[0]
    line = before + "".join(texts[first:last]) + after
    return f"… {' '.join(line.split())} …"
