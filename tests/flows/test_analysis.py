"""Analyses of stored studies: parts, tasks and processes give the same bits; logs without a plan are exploratory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.stored_units import make_unit, units_of

from benchmarks.synthetic_study import MODEL, STUDY, Sizes, document_rows, write_study
from kvdrift.command import main
from kvdrift.flows.estimate import estimation
from kvdrift.flows.estimate.estimation import (
    Analysis,
    AnalysisPart,
    Subject,
    estimate_part,
    estimate_parts,
    parts_of,
    subjects_of,
)
from kvdrift.flows.estimate.moments import answer_moments, document_moments, replicate_moments
from kvdrift.flows.estimate.scores import known_answers
from kvdrift.flows.estimate.stored import analyze_stored
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.progress import Progress
from kvdrift.schema.tables import ACTIONS, DOCUMENTS
from kvdrift.sql.catalog import open_views
from kvdrift.stats import bootstrap
from kvdrift.stats.bootstrap import COLUMNS, Estimates, Request, estimate
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.quantities import QUANTITIES
from kvdrift.stats.reduction import CONTROLS, REDUCED, fit_coefficients, is_reduced, reduced_documents
from kvdrift.stats.simultaneous import simultaneous_gaps
from kvdrift.transforms.pipeline import run_derivation

DRAWS = ((("gap", "mismatch"), 100), (tuple(name for name in QUANTITIES if name not in {"gap", "mismatch"}), 30))
SIZES = Sizes(strata=2, documents=4, actions=2, replicates=3, horizon=8)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic study, derived and not analyzed; tests that write to it take a copy."""
    folder = tmp_path_factory.mktemp("synthetic") / "store"
    write_study(str(folder), SIZES, seed=5)
    return folder


@pytest.fixture(scope="module")
def moments(synthetic: Path) -> DocumentMoments:
    """The moments of its documents."""
    with open_views(Store.open(synthetic)) as views:
        return document_moments(views, STUDY, MODEL, "evaluation")


ANALYSIS = Analysis(STUDY, MODEL, "evaluation", 5, DRAWS, Request(), None)


@pytest.fixture(scope="module")
def whole(moments: DocumentMoments) -> list[dict[str, object]]:
    """The estimates of the analysis, made without parts."""
    return by_key(estimate(moments, draws=draws, seed=5, quantities=names) for names, draws in DRAWS)


def small_parts(moments: DocumentMoments, monkeypatch: pytest.MonkeyPatch) -> list[AnalysisPart]:
    """An analysis cut into several parts, which its default bound would leave whole."""
    left_whole = parts_of(ANALYSIS, moments, subjects_of(moments))
    monkeypatch.setattr(bootstrap, "_GROUP_BYTES", 20_000)
    parts = parts_of(ANALYSIS, moments, subjects_of(moments))
    assert len(parts) > 2 * len(left_whole)
    return parts


def test_parts_give_the_same_bits_abreast_in_other_groups_and_one_by_one(
    moments: DocumentMoments, whole: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = small_parts(moments, monkeypatch)
    sequential = [*map(estimate_part, parts)]
    assert [one.columns for one in estimate_parts(parts)] == [one.columns for one in sequential]
    assert by_key(sequential) == whole


def test_an_action_or_a_contrast_has_the_same_bits_alone(
    moments: DocumentMoments, whole: list[dict[str, object]]
) -> None:
    subjects = subjects_of(moments)
    assert Subject("keep-1", "keep-2") in subjects
    alone = [one for subject in subjects for one in map(estimate_part, parts_of(ANALYSIS, moments, [subject]))]
    assert by_key(alone) == whole


def test_one_action_with_coefficients_has_reduced_estimates_beside_another_without(
    moments: DocumentMoments, whole: list[dict[str, object]]
) -> None:
    """As an ingested action, which has no development documents."""
    beta = {"keep-1": np.zeros((len(CONTROLS), len(REDUCED)))}
    some = by_key(map(estimate_part, parts_of(ANALYSIS, moments, subjects_of(moments), beta)))
    for row, other in zip(whole, some, strict=True):
        if row["action"] == "keep-1" and row["baseline"] is None and other["estimate_reduced"] is not None:
            assert abs(other["estimate_reduced"] - row["estimate"]) < 1e-12, "coefficients of 0 change nothing"
        else:
            assert other == row
    assert any(row["estimate_reduced"] is not None for row in some)


def by_key(estimates: Iterable[Estimates]) -> list[dict[str, object]]:
    """Estimates as rows, in the order of their keys."""
    rows = pa.table(Estimates.join([*estimates]).columns)
    return rows.sort_by([(n, "ascending") for n in ("quantity", "stratum", "action", "baseline", "x")]).to_pylist()


def test_a_study_run_as_a_flow_has_the_estimates_of_a_plain_analysis(finished: Path) -> None:
    """The flow of the shared study estimated its parts as tasks; the same in sequence, bit for bit."""
    store = Store.open(finished)
    plan = find_plan(store, "small", "kvdrift/tiny")
    assert plan is not None
    with open_views(store) as views:
        moments = document_moments(views, "small", "kvdrift/tiny", "evaluation")
        known = known_answers(store, "small", "kvdrift/tiny")
        answers = answer_moments(views, "small", "kvdrift/tiny", "evaluation", moments.windows, known)
    assert answers is not None
    planned = Analysis.planned(plan)
    parts = parts_of(planned, moments, subjects_of(moments))
    parts += parts_of(planned, answers, subjects_of(answers, answers=True), answers=True)
    level = planned.request.level
    pairs = simultaneous_gaps(moments, draws=planned.exploratory_draws, seed=planned.seed, level=level)
    plain = [*map(estimate_part, parts), pairs]
    assert store.read("results").select(list(COLUMNS)).to_pylist() == by_key(plain)


def analyze(location: Path | str) -> None:
    """``kvdrift analyze`` in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["analyze", str(location)])
    assert ended.value.code in {0, 2}


def test_estimates_stand_where_no_moment_changed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of another study in the store: repeated bit for bit."""
    store = Store.open(copied)
    before = estimates_of(store)
    store.append_units([make_unit()])
    run_derivation(store.location)
    monkeypatch.setattr(estimation, "estimate_parts", lambda *_: pytest.fail("something is estimated again"))
    assert analyze_stored(store, "small", "kvdrift/tiny") == 0
    assert store.read("results").num_rows == 2 * before.num_rows
    assert estimates_of(store).equals(before)
    with open_views(store) as views:
        assert set(views.rows("estimates")["events_version"].to_pylist()) == {store.version("events")}


def test_only_what_is_new_is_estimated_and_equals_an_analysis_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two actions, then a third, then one redone; the result equals one analysis in another store."""
    monkeypatch.setattr(estimation, "EXPLORATORY_DRAWS", 100)
    source = write_study(str(tmp_path / "source"), dataclasses.replace(SIZES, actions=3), seed=5, derived=False)
    units = units_of(source)
    parts: list[AnalysisPart] = []

    def counted(some: Sequence[AnalysisPart], _: Progress) -> list[Estimates]:
        parts.extend(some)
        return [*map(estimate_part, some)]

    monkeypatch.setattr(estimation, "estimate_parts", counted)

    def analyzed(store: Store, *actions: str, revision: int = 0) -> tuple[set[str], set[tuple[str, str]]]:
        """Add units of actions; return which actions and which contrasts were estimated."""
        own = [unit for unit in units if unit.record["action"] in actions]
        store.append_units([
            Unit(one.record | {"action_revision": revision}, one.events.drop_columns("action_revision")) for one in own
        ])  # fmt: skip
        run_derivation(store.location)
        parts.clear()
        assert analyze_stored(store, STUDY, MODEL) > 0
        alone = {action for part in parts if not part.contrasts for action in part.moments.actions}
        return alone, {pair for part in parts for pair in part.contrasts}

    store, fresh = (Store.create(tmp_path / name) for name in ("store", "fresh"))
    for one in (store, fresh):
        one.append_rows("documents", source.read("documents"))
        one.append_rows("actions", source.read("actions"))
    two = ("keep-1", "keep-2")
    assert analyzed(store, *two) == (set(two), set(itertools.permutations(two, 2)))
    third = {pair for name in two for pair in ((name, "keep-3"), ("keep-3", name))}
    assert analyzed(store, "keep-3") == ({"keep-3"}, third)
    row = source.read("actions").to_pylist()[0] | {"action": "keep-2", "action_revision": 1}
    for one in (store, fresh):
        one.append_rows("actions", pa.Table.from_pylist([row], schema=ACTIONS.schema))
    redone = {pair for name in ("keep-1", "keep-3") for pair in ((name, "keep-2"), ("keep-2", name))}
    assert analyzed(store, "keep-2", revision=1) == ({"keep-2"}, redone)
    fresh.append_units([one for one in units if one.record["action"] != "keep-2"])
    analyzed(fresh, "keep-2", revision=1)
    assert newest_results(store).equals(newest_results(fresh))


def newest_results(store: Store) -> pa.Table:
    """The rows that cite the present events, but for that."""
    rows = store.read("results")
    return rows.filter(pc.equal(rows["events_version"], store.version("events"))).drop_columns("events_version")


def estimates_of(store: Store) -> pa.Table:
    """The newest estimates, but for the version that they cite."""
    with open_views(store) as views:
        return views.rows("estimates", study="small").drop_columns("events_version")


def test_every_split_is_analyzed_and_the_seed_is_the_studys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log from elsewhere: no row in studies, and documents of two splits."""
    monkeypatch.setattr(estimation, "EXPLORATORY_DRAWS", 100)
    store = Store.create(tmp_path / "store")
    source = Store.open(write_study(str(tmp_path / "source"), SIZES, seed=5, derived=False).location)
    documents = [
        row | {"split": "development" if row["doc"].endswith("0") else "evaluation"} for row in document_rows(SIZES)
    ]
    store.append_rows("documents", pa.Table.from_pylist(documents, schema=DOCUMENTS.schema))
    store.append_units(units_of(source))
    with pytest.raises(InputError, match=r"^16 units .*: kvdrift derive"):
        analyze_stored(store, STUDY, MODEL)
    run_derivation(store.location)
    before = store.version("results")
    count = analyze_stored(store, STUDY, MODEL)
    assert store.version("results") == before + 1, "a kill between two commits would leave a split that nobody misses"
    rows = store.read("results").to_pylist()
    assert len(rows) == count
    counted = {(row["split"], row["stratum"]): row["documents"] for row in rows}
    assert counted[("development", "pooled")] == 2
    assert counted[("evaluation", "pooled")] == 6
    with open_views(store) as views:
        assert Analysis.exploratory(views, STUDY, MODEL, "evaluation").seed == 0
    with open_views(source) as views:
        assert Analysis.exploratory(views, STUDY, MODEL, "evaluation").seed == 5


@pytest.mark.slow
def test_evaluation_documents_are_reduced_by_coefficients_of_development_documents(tmp_path: Path) -> None:
    """Of a development document there are no reduced estimates."""
    sizes = Sizes(strata=1, documents=6, actions=2, replicates=8, horizon=8)
    source = Store.open(write_study(str(tmp_path / "source"), sizes, seed=5).location)
    splits = ["development"] * 3 + ["evaluation"] * 3
    rows = [row | {"split": split} for row, split in zip(document_rows(sizes), splits, strict=True)]
    store = Store.create(tmp_path / "store")
    store.append_rows("documents", pa.Table.from_pylist(rows, schema=DOCUMENTS.schema))
    store.append_units(units_of(source))
    run_derivation(store.location)
    analyze_stored(store, STUDY, MODEL)
    with open_views(store) as views:
        beta = fit_coefficients(replicate_moments(views, STUDY, MODEL, "development"))
        moments = reduced_documents(document_moments(views, STUDY, MODEL, "evaluation"), beta)
    assert moments is not None
    names = [name for name, one in QUANTITIES.items() if is_reduced(one, moments)]
    again = pa.table(estimate(moments, draws=2_000, seed=0, quantities=names).columns).to_pylist()
    keys, numbers = ("quantity", "action", "baseline", "stratum", "x"), ("estimate", "low", "high")
    expected = {tuple(row[key] for key in keys): [row[name] for name in numbers] for row in again}
    results = store.read("results").to_pylist()
    reduced = [row for row in results if row["estimate_reduced"] is not None]
    assert {row["split"] for row in reduced} == {"evaluation"}
    plain = {tuple(row[key] for key in keys): row["estimate"] for row in results if row["split"] == "evaluation"}
    assert {tuple(row[key] for key in keys): [row[f"{name}_reduced"] for name in numbers] for row in reduced} == {
        key: values for key, values in expected.items() if None not in (values[0], plain[key])
    }
    assert all(abs(plain[key] - values[0]) > 1e-6 for key, values in expected.items() if key[0] == "gap")


def test_nothing_to_estimate_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.create(tmp_path / "store")
    analyze(store.location)
    assert "holds no study yet" in capsys.readouterr().err
    store.append_rows("documents", pa.Table.from_pylist(document_rows(SIZES), schema=DOCUMENTS.schema))
    with pytest.raises(InputError, match="no complete trajectories of any action but the control"):
        analyze_stored(store, STUDY, MODEL)


def test_document_moments_are_means_of_replicate_moments(synthetic: Path) -> None:
    with open_views(Store.open(synthetic)) as views:
        documents = document_moments(views, STUDY, MODEL, "evaluation")
        replicates = replicate_moments(views, STUDY, MODEL, "evaluation")
    assert replicates.scalars["mismatch"].shape == (8, 2, 3)
    for name, value in replicates.document_means().scalars.items():
        assert documents.scalars[name] == pytest.approx(value, abs=1e-12), name
