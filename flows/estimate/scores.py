"""Scores of continuations against their documents' answers, and whether a study's estimates are up to date.

Table ``scores`` has a row for each coupled pair whose document has answers. Scoring needs only the model's tokenizer.
Stored scores stay, so that only new pairs cost time. Pairs of a document with corrected answers are scored again, and
their earlier scores are superseded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.generator.documents.answers import Decode, Tokens, score_pairs, task_scoring
from kvdrift.generator.transformer.files.tokenizer import text_decoder, token_texts
from kvdrift.log.counts import Answers, Counts, Place, Scored
from kvdrift.log.last_times import LastTimes
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_actions, current_scores
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.study import FINITE_STATE
from kvdrift.schema.tables import PLAIN, SCORES, TOKENS
from kvdrift.stats.quantities import ANSWER_QUANTITIES

_BATCH = 4096  # pairs of a commit, in whole units; a kill loses at most these
_UNIT = ["doc", "action", "action_revision", "first_replicate", "replicates", "horizon", "unit"]
_NO_UNITS = pa.table({})
_TOKENS = ("x_token", "y_token", "x_eos", "y_eos")


@dataclass(frozen=True)
class KnownAnswers:
    """The answers that a right continuation of a document states, and the rule that scores it."""

    answers: tuple[str, ...]
    scoring: str
    split: str
    document_revision: int


def known_answers(store: Store, study: str, model: str, docs: pa.Array | None = None) -> dict[str, KnownAnswers]:
    """Return the known answers of each document that can be scored, keyed by id; ``docs`` are the ids to read."""
    known = {}
    columns = ["doc", "split", "task", "source", "answers", "scoring", "document_revision"]
    documents = store.documents(study, model, columns)
    if docs is not None:
        documents = documents.filter(pc.is_in(documents["doc"], value_set=docs))
    for row in documents.filter(pc.greater(pc.list_value_length(documents["answers"]), 0)).to_pylist():
        answers = tuple(answer for answer in row["answers"] if answer)
        if answers:
            scoring = _scoring(Answers(row["source"], row["task"], row["scoring"]))
            if scoring is not None:
                known[row["doc"]] = KnownAnswers(answers, scoring, row["split"], row["document_revision"])
    return known


def _scoring(answers: Answers) -> str | None:
    """Return the rule by which answers are scored; None if they are not scored."""
    return answers.scoring or task_scoring(answers.source or "", answers.task or "")


class Scoring:
    """The scored and unscored pairs of a study and model.

    Pairs are counted without reading rows; rows are read only if there is something to score. ``documents`` is how many
    documents have answers that can be scored.
    """

    def __init__(self, store: Store, study: str, model: str, counts: Counts) -> None:
        self._store, self._study, self._model = store, study, model
        self._pairs = Counter[Scored]()  # pairs that can be scored
        self._scored = counts.scores
        self.documents = sum(count for place, count in counts.documents.items() if self._is_scorable(place))
        for (place, held), count in counts.current.items():
            if held.estimator == PLAIN and self._is_scorable(place):
                of = Scored(study, model, place.split, held.action, held.action_revision)
                self._pairs[of] += count * held.replicates

    @classmethod
    def stored(cls, store: Store, study: str, model: str) -> Self:
        """Count the scored and unscored pairs of a study and model in a store."""
        return cls(store, study, model, store.counts(store.read("actions")))

    def _is_scorable(self, place: Place) -> bool:
        of_study = (place.study, place.model) == (self._study, self._model)
        return of_study and place.answers is not None and _scoring(place.answers) is not None

    @functools.cached_property
    def unscored_pairs(self) -> Counter[str]:
        """Count, by split, the pairs that can be scored and are not scored yet."""
        unscored = Counter[str]()
        for of, count in self._pairs.items():
            unscored[of.split or ""] += max(0, count - self._scored[of])  # the units of scored pairs may be lost
        return +unscored

    @functools.cached_property
    def answered(self) -> Mapping[str, KnownAnswers]:
        """The known answers of the documents in ``unscored``, keyed by document id."""
        units = self._lacking
        return known_answers(self._store, self._study, self._model, units["doc"].unique()) if units.num_rows else {}

    @functools.cached_property
    def unscored(self) -> pa.Table:
        """The current units of coupled pairs that can be scored and are not scored yet, sorted by document."""
        units = self._lacking
        scored = pa.array([*self.answered], pa.string())
        return units.filter(pc.is_in(units["doc"], value_set=scored)) if units.num_rows else units

    @functools.cached_property
    def _lacking(self) -> pa.Table:
        """The current units of coupled pairs that have no scores, sorted by document; no rows if all are scored."""
        if all(self._scored[of] == count for of, count in self._pairs.items()):
            return _NO_UNITS
        units = self._store.units(self._study, self._model, [*_UNIT, "estimator"])
        keys = ["doc", "action", "action_revision", "replicate"]
        scores = self._store.read("scores", columns=["study", "model", *keys, "document_revision"])
        documents = self._store.read("documents", columns=["study", "model", "doc", "document_revision"])
        scores = current_scores(scores, documents)
        of_study = pc.and_(pc.equal(scores["study"], self._study), pc.equal(scores["model"], self._model))
        # One commit scores all pairs of a unit, so the first pair decides.
        lacking = units.filter(pc.equal(units["estimator"], PLAIN)).join(
            scores.filter(of_study).select(keys), [*keys[:3], "first_replicate"], keys, "left anti"
        )
        return lacking.sort_by([(name, "ascending") for name in (*keys[:3], "first_replicate")])

    def scored_splits(self, controls: Collection[str]) -> set[str]:
        """Return the splits that have pairs of an action not in ``controls``, and whose pairs are all scored."""
        return {of.split or "" for of in self._pairs if of.action not in controls} - set(self.unscored_pairs)


def score_stored(
    store: Store,
    study: str,
    model: str,
    *,
    revision: str | None = None,
    location: str | None = None,
    progress: Progress = SILENT,
) -> int:
    """Score the coupled pairs of a study and model that are not scored yet; return how many.

    If the model's tokenizer cannot be loaded, nothing is scored, and a line reports it. ``revision`` and ``location``
    are those of the study file; by default the model's id names its files.
    """
    scoring = Scoring.stored(store, study, model)
    units = scoring.unscored
    if not units.num_rows:
        return 0
    decode = text_decoder(model if location is None else location, revision=revision)
    if decode is None:
        progress.say(f"answers are not scored: the tokenizer of '{model}' cannot be loaded here")
        return 0
    progress.begin("answers", units.num_rows, "units")
    count, batch = 0, list[dict[str, Any]]()
    for rows in _scored_documents(store, units, scoring.answered, decode, progress):
        batch += rows
        if len(batch) >= _BATCH:
            count += _append(store, study, model, batch)
            batch = []
    return count + _append(store, study, model, batch)


def _scored_documents(
    store: Store, unscored: pa.Table, answers: Mapping[str, KnownAnswers], decode: Decode, progress: Progress
) -> Iterator[list[dict[str, Any]]]:
    """Score the pairs in ``unscored``; yield the rows of ``scores``, without study and model, document by document."""
    events = store.rows_of_units("events")
    rows = unscored.to_pylist()
    begin = 0
    while begin < len(rows):
        doc = rows[begin]["doc"]
        end = next((at for at in range(begin, len(rows)) if rows[at]["doc"] != doc), len(rows))
        named, pairs = list[dict[str, Any]](), list[tuple[Tokens, Tokens]]()
        units = rows[begin:end]
        count = sum(unit["replicates"] * unit["horizon"] for unit in units)
        tokens_by_unit = events.read_each([unit["unit"] for unit in units], [doc], _TOKENS, count)
        for unit, tokens in zip(units, tokens_by_unit, strict=True):
            pairs += _continuations(tokens, unit["replicates"], unit["horizon"])
            names = {name: unit[name] for name in ("doc", "action", "action_revision")}
            first = unit["first_replicate"]
            named += [names | {"replicate": replicate} for replicate in range(first, first + unit["replicates"])]
        known = answers[doc]
        scores = score_pairs(pairs, known.answers, known.scoring, decode)
        by = {"scoring": known.scoring, "document_revision": known.document_revision}
        yield [name | by | vars(score) for name, score in zip(named, scores, strict=True)]
        progress.advance(end - begin)
        begin = end


def _continuations(events: pa.Table, replicates: int, horizon: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the tokens of X and Y of each replicate up to EOS; ``events`` is sorted by replicate and position."""
    x, y, x_eos, y_eos = (events[name].to_numpy().reshape(replicates, horizon) for name in _TOKENS)
    for k in range(replicates):
        sides = ((x[k], x_eos[k]), (y[k], y_eos[k]))
        first, second = (tuple(tokens[: horizon - np.count_nonzero(eos)].tolist()) for tokens, eos in sides)
        yield first, second


def _append(store: Store, study: str, model: str, rows: list[dict[str, Any]]) -> int:
    if not rows:
        return 0
    named = [{"study": study, "model": model} | row for row in rows]
    return store.append_rows("scores", pa.Table.from_pylist(named, schema=SCORES.schema))


def record_tokens(
    store: Store,
    study: str,
    model: str,
    *,
    revision: str | None = None,
    location: str | None = None,
    progress: Progress = SILENT,
) -> int:
    """Record the text of each token of a study's model, unless the store has these texts; return how many are new.

    If the model's tokenizer cannot be loaded, nothing is recorded, and a line reports it. Finite-state systems have no
    token texts. ``revision`` and ``location`` are those of the study file, as in ``score_stored``.
    """
    known = store.read("tokens", columns=["study", "model"])
    if pc.any(_of(known, study, model)).as_py():
        return 0
    documents = store.read("documents", columns=["study", "model", "source"])
    if FINITE_STATE in documents.filter(_of(documents, study, model))["source"].to_pylist():
        return 0
    texts = token_texts(model if location is None else location, revision=revision)
    if texts is None:
        progress.say(f"table tokens has no texts: the tokenizer of '{model}' cannot be loaded here")
        return 0
    names = {"study": [study] * len(texts), "model": [model] * len(texts)}
    columns = names | {"token": [*texts], "text": [*texts.values()]}
    return store.append_rows("tokens", pa.table(columns, schema=TOKENS.schema))


def _of(rows: pa.Table, study: str, model: str) -> pa.ChunkedArray:
    return pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model))


def estimates_are_current(store: Store, study: str, model: str) -> bool:
    """Return whether the study's results are estimates from the present events and documents, by the newest plan."""
    return estimated_version(store, study, model) == store.data_version("events")


def estimated_version(store: Store, study: str, model: str) -> int | None:
    """Return the newest version of the events from which results were estimated; None without results.

    Only results under the newest plan and from the newest revision of the study's documents count.
    """
    newest = pc.max(_present_rows(store, study, model)["events_version"]).as_py()
    return None if newest is None else int(newest)


def estimated_at(store: Store, study: str, model: str, times: LastTimes) -> datetime | None:
    """Return when the newest estimates of a study were stored, whatever their plan; None if that is not known."""
    at, version = times.estimates.get((study, model), (None, -1))
    if at is None:
        return None
    rows = store.read("results", columns=["study", "model", "events_version"])
    of_study = pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model))
    stored = rows["events_version"].filter(of_study).unique().to_pylist()
    return at if version in stored else None  # a killed process had recorded the time, and not stored the estimates


def _present_rows(store: Store, study: str, model: str) -> pa.Table:
    """Return the results under the newest plan, from the newest revision of the study's documents."""
    plan = find_plan(store, study, model)
    columns = ["study", "model", "split", "events_version", "plan_sha256", "quantity", "documents_revision"]
    results = store.read("results", columns=columns)
    wanted = {"study": study, "model": model, "plan_sha256": None if plan is None else plan.sha256}
    for name, value in wanted.items():
        results = results.filter(pc.is_in(results[name], value_set=pa.array([value], pa.string())))
    if not results.num_rows:  # behind a URL, reading documents takes requests
        return results
    return results.filter(pc.equal(results["documents_revision"], store.documents_revision(study, model)))


def answers_are_current(store: Store, study: str, model: str, scoring: Scoring) -> bool:
    """Return whether the newest estimates include answers in each of their splits that has scored answers.

    A split has scored answers if all its pairs are scored, and some pair is of an action other than the control.
    """
    current = current_actions(store.read("actions"), study)
    scored = scoring.scored_splits({name for name, row in current.items() if row["control"]})
    rows = _present_rows(store, study, model)
    rows = rows.filter(pc.equal(rows["events_version"], pc.max(rows["events_version"])))
    of_answers = rows.filter(pc.is_in(rows["quantity"], value_set=pa.array([*ANSWER_QUANTITIES])))
    lacking = set(rows["split"].to_pylist()) - set(of_answers["split"].to_pylist())
    return not lacking & scored
