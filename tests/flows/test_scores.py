"""Scoring continuations of stored studies: each pair once, compared with a plain reading of its text."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.heard import Heard
from fixtures.small_study import run_of, write_study
from fixtures.stored_units import killed_in
from fixtures.study_files import load_study
from oracles.plain_scores import SCORES, plain_span, up_to_eos

from kvdrift.flows.estimate import estimation, scores
from kvdrift.flows.estimate.moments import answer_moments, replicate_answers
from kvdrift.flows.estimate.scores import Scoring, answers_are_current, known_answers, score_stored
from kvdrift.flows.estimate.stored import analyze_stored
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import forecast
from kvdrift.generator.embedded import vocabulary
from kvdrift.generator.embedded.documents import make_document
from kvdrift.log.store import Store, Unit
from kvdrift.schema.tables import DOCUMENTS, EVENTS, TABLES
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import open_views
from kvdrift.stats.quantities import ANSWER_QUANTITIES
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.verification.whole_store import verify

STUDY, MODEL, H = "s", "kvdrift/tiny", 40
ACTIONS = ("gentle", "harsh")
DOCUMENTS_OF = {f"needle-{n}": make_document("needle", 384, n, 7) for n in range(4)}


def unit(doc: str, action: str, first: int = 0, replicates: int = 6, revision: int = 0) -> Unit:
    """Pairs that state the items of a document, of which an action may get some wrong, end, and go on after it."""
    rows: list[dict[str, Any]] = []
    for replicate in range(first, first + replicates):
        draws = random.Random(f"{doc} {replicate}")  # noqa: S311 - numbers of a test
        items = [vocabulary.to_tokens(answer) for answer in DOCUMENTS_OF[doc].answers]
        draws.shuffle(items)
        x = [token for item in items[: draws.choice((4, 5, 5))] for token in (*item, vocabulary.FIRST_FILLER)]
        wrong = random.Random(f"{doc} {replicate} {action}").random() < (0.8 if action == "harsh" else 0.3)  # noqa: S311
        y = [*x[:9], vocabulary.FIRST_VALUE, *x[10:]] if wrong else list(x)
        sides = [[*side, *[vocabulary.EOS] * (H - len(side))] for side in (x, y)]
        rows += [
            {
                "study": STUDY, "model": MODEL, "doc": doc, "action": action, "replicate": replicate, "t": t + 1,
                "x_token": sides[0][t], "y_token": sides[1][t], "delta": 0.5, "f": 0.5, "x_eos": t >= len(x),
                "y_eos": t >= len(y), "kind": "coupled", "weight": None, "action_revision": revision,
            }
            for t in range(H)
        ]  # fmt: skip
    record = {
        "study": STUDY, "model": MODEL, "doc": doc, "action": action, "first_replicate": first,
        "replicates": replicates, "horizon": H, "estimator": "plain", "action_revision": revision,
    }  # fmt: skip
    return Unit(record, pa.Table.from_pylist(rows, schema=EVENTS.schema))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "store")


def make_store(folder: Path, *development: str) -> Store:
    """Make a store of documents with answers, some in the development split, and of one document without answers."""
    made = Store.create(folder)
    documents = [
        dict.fromkeys(DOCUMENTS.columns) | DOCUMENTS.defaults | {
            "study": STUDY, "model": MODEL, "doc": doc, "stratum": "n", "cluster": doc,
            "split": "development" if doc in development else "evaluation",
            "task": "needle", "source": "embedded", "answers": list(document.answers),
        }
        for doc, document in DOCUMENTS_OF.items()
    ]  # fmt: skip
    documents.append(documents[0] | {"doc": "unknown", "cluster": "unknown", "answers": []})
    made.append_rows("documents", pa.Table.from_pylist(documents, schema=DOCUMENTS.schema))
    made.append_units([unit(doc, action) for doc in DOCUMENTS_OF for action in ACTIONS])
    return made


def score(store: Store) -> int:
    return score_stored(store, STUDY, MODEL)


def scoring_of(store: Store) -> Scoring:
    return Scoring.stored(store, STUDY, MODEL)


def is_current(store: Store) -> bool:
    return answers_are_current(store, STUDY, MODEL, scoring_of(store))


def test_every_pair_is_scored_once_as_its_text_says(store: Store) -> None:
    assert (scoring_of(store).unscored.num_rows, score(store), score(store)) == (8, 48, 0)
    events: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in store.read("events").to_pylist():
        events.setdefault((row["doc"], row["action"], row["replicate"]), []).append(row)
    stored = store.read("scores").to_pylist()
    assert len({(row["doc"], row["action"], row["replicate"]) for row in stored}) == len(stored) == len(events)
    for row in stored:
        pair = sorted(events[row["doc"], row["action"], row["replicate"]], key=lambda one: one["t"])
        x, y = (up_to_eos([one[f"{side}_token"] for one in pair], vocabulary.EOS) for side in "xy")
        answers = DOCUMENTS_OF[row["doc"]].answers
        assert row["scoring"] == "all"
        assert row["score_x"] == SCORES["all"](vocabulary.to_text(x), answers)
        assert row["score_y"] == SCORES["all"](vocabulary.to_text(y), answers)
        assert (row["span_first"], row["span_last"]) == plain_span(x, answers, "all", vocabulary.to_text)


def test_what_is_new_is_scored_and_what_a_kill_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_BATCH", 1)  # a commit to a document
    with killed_in(monkeypatch, Heard, "advance"):
        score_stored(store, STUDY, MODEL, progress=Heard())
    assert store.row_count("scores") == 12
    assert score(store) == 36
    store.append_units([unit("needle-1", "harsh", first=6, replicates=2)])
    assert [row["first_replicate"] for row in scoring_of(store).unscored.to_pylist()] == [6]
    assert (score(store), score(store)) == (2, 0)


def test_without_a_tokenizer_one_line_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "text_decoder", lambda *_, **__: None)
    heard = Heard()
    assert score_stored(store, STUDY, MODEL, progress=heard) == 0
    (line,) = heard.lines
    assert line.startswith("answers are not scored: ")
    assert "'kvdrift/tiny'" in line


def test_accuracy_is_that_of_a_plain_reading_and_is_estimated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimation, "EXPLORATORY_DRAWS", 100)
    run_derivation(store.location)
    heard = Heard()
    assert analyze_stored(store, STUDY, MODEL, progress=heard) > 0, "not scored yet: all but answers"
    before = store.read("results")
    assert not set(before["quantity"].to_pylist()) & set(ANSWER_QUANTITIES)
    score(store)
    new = analyze_stored(store, STUDY, MODEL)
    after = store.read("results")
    assert new == after.num_rows - before.num_rows > 0
    of_answers = pc.is_in(after["quantity"], pa.array(list(ANSWER_QUANTITIES)))
    order = [(name, "ascending") for name in ("quantity", "stratum", "action", "baseline", "x")]
    assert after.filter(pc.invert(of_answers)).sort_by(order).equals(before.sort_by(order)), "what was there stays"
    assert set(after.filter(of_answers)["quantity"].to_pylist()) == set(ANSWER_QUANTITIES)
    assert analyze_stored(store, STUDY, MODEL) == 0
    with open_views(store) as views:
        shown = {row["action"]: row for row in views.rows("answers", stratum="pooled").to_pylist()}
        estimated = {
            row["action"]: row for row in views.rows("estimates", stratum="pooled", quantity="lost").to_pylist()
        }
        windows = Windows.of(H)
        known = known_answers(store, STUDY, MODEL)
        documents = answer_moments(views, STUDY, MODEL, "evaluation", windows, known)
        replicates = replicate_answers(views, STUDY, MODEL, "evaluation", windows)
    assert documents is not None
    assert replicates is not None
    means = replicates.document_means().scalars
    assert means.keys() == documents.scalars.keys()
    for name, values in documents.scalars.items():
        assert means[name] == pytest.approx(values, abs=1e-12), name
    for action in ACTIONS:
        rights = [
            statistics.fmean(right(doc, action, replicate, side) for doc in DOCUMENTS_OF for replicate in range(6))
            for side in "xy"
        ]
        assert shown[action]["reference_right"] == pytest.approx(rights[0])
        assert shown[action]["lost"] == pytest.approx(rights[0] - rights[1] + shown[action]["gained"])
        assert estimated[action]["estimate"] == pytest.approx(shown[action]["lost"])
        assert estimated[action]["low"] <= estimated[action]["estimate"] <= estimated[action]["high"]
    assert shown["harsh"]["lost_share"] > shown["gentle"]["lost_share"]


@pytest.mark.slow
def test_answers_of_one_split_do_not_stand_for_those_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs scored at the time of the first estimates are not all pairs."""
    store = make_store(tmp_path / "store", "needle-0")
    run_derivation(store.location)
    assert is_current(store), "nothing is scored"
    monkeypatch.setattr(scores, "_BATCH", 1)
    with killed_in(monkeypatch, Heard, "advance"):
        score_stored(store, STUDY, MODEL, progress=Heard())
    analyze_stored(store, STUDY, MODEL)
    assert (splits_with_answers(store), is_current(store)) == ({"development"}, True)
    score(store)
    assert not is_current(store)
    assert analyze_stored(store, STUDY, MODEL) > 0
    assert (splits_with_answers(store), is_current(store)) == ({"development", "evaluation"}, True)
    assert analyze_stored(store, STUDY, MODEL) == 0


def splits_with_answers(store: Store) -> set[str]:
    rows = store.read("results")
    return set(rows.filter(pc.is_in(rows["quantity"], pa.array([*ANSWER_QUANTITIES])))["split"].to_pylist())


def right(doc: str, action: str, replicate: int, side: str) -> bool:
    rows = [row for row in unit(doc, action).events.to_pylist() if row["replicate"] == replicate]
    text = vocabulary.to_text(up_to_eos([row[f"{side}_token"] for row in rows], vocabulary.EOS))
    return SCORES["all"](text, DOCUMENTS_OF[doc].answers) == 1


def check_of_scores(store: Store) -> Any:
    """The check of scores that ``verify`` makes, after which it makes no other one."""
    return next(check for check in verify(store) if check.subject == "scores")


def test_verification_names_scores_of_no_pair(store: Store) -> None:
    score(store)
    assert check_of_scores(store).faults == ()
    rows = store.read("scores").slice(0, 1).to_pylist()
    wrong = [rows[0] | {"replicate": 99, "score_y": 2.0}, rows[0] | {"doc": "unknown", "span_last": 77}]
    store.append_rows("scores", pa.Table.from_pylist(wrong, schema=store.read("scores").schema))
    said = " ".join(map(str, check_of_scores(store).faults))
    for part in ("its replicate is in no", "score_y is 2.0, must be within 0..1", "its document has no answers"):
        assert part in said


def test_a_finished_study_is_scored_when_it_is_run_again(copied: Path, tmp_path: Path) -> None:
    """Nothing is generated, and the estimates that were there stay as they are."""
    run = run_of(load_study(write_study(tmp_path)), copied)
    store = run.store
    units, scored, results = store.row_count("units"), store.read("scores"), store.read("results")
    of_answers = pc.is_in(results["quantity"], pa.array(list(ANSWER_QUANTITIES)))
    assert stages.is_finished(run)
    for table in ("scores", "results"):
        store.withdraw_files(table, store.paths(table))
    store.append_rows("results", results.filter(pc.invert(of_answers)))
    assert forecast(run).unscored > 0
    assert not stages.is_finished(run)
    stages.prepare(run)
    assert (stages.develop(run), stages.evaluate(run), stages.derive(run)) == (0, 0, 0)
    assert stages.score(run) == scored.num_rows
    assert stages.analyze(run) == pc.sum(of_answers).as_py()
    assert store.row_count("units") == units
    for table, before in (("scores", scored), ("results", results)):
        order = [(name, "ascending") for name in TABLES[table].key]
        assert store.read(table).sort_by(order).equals(before.sort_by(order)), table
