"""A running study: units counted as they come are those of the store, and the quick interval is the textbook's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fixtures.command import call
from fixtures.event_logs import documents_csv, make_log, write
from scipy import special, stats

from kvdrift.flows.pages.live import Divergence, LiveStore, StudySnapshot
from kvdrift.flows.plan.frozen_plan import UnitsDone
from kvdrift.ingestion.ingest import ingest
from kvdrift.live import show_live
from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views
from kvdrift.stats.preliminary import preliminary_mean
from kvdrift.transforms.compaction import compact
from kvdrift.transforms.watch import watch


def derive(store: Store) -> None:
    watch(store.location, 0.0, iter([False, True]).__next__)


def test_what_is_counted_as_it_comes_is_what_is_there(tmp_path: Path) -> None:
    location, documents = tmp_path / "store", documents_csv(tmp_path)
    ingest(location, [write(tmp_path / "0.parquet", make_log(replicates=range(2)))], documents)
    store = Store.open(location)
    live = LiveStore(store)

    def check() -> StudySnapshot:
        (found,), (anew,) = live.snapshots(), LiveStore(Store.open(location)).snapshots()
        assert replace(found, rate=None) == replace(anew, rate=None)
        return found

    assert (check().stored, check().derived, check().divergence) == (8, 0, ())
    derive(store)
    assert check().derived == 16
    compact(store)  # nothing new
    assert check().derived == 16
    ingest(location, [write(tmp_path / "1.parquet", make_log(replicates=range(2, 5)))], documents)
    derive(store)
    assert (check().stored, check().derived) == (16, 40)
    ingest(location, [write(tmp_path / "2.parquet", make_log(replicates=range(5, 6)))], documents)
    derive(store)
    compact(store)  # what is new is beside what is known in one file
    found = check()
    assert (found.stored, found.derived) == (24, 48)
    assert [(one.action, one.documents) for one in found.divergence] == [("half", 2)]
    assert found.split == "evaluation"
    assert found.rate is not None


def test_the_divergence_is_that_of_the_views(finished: Path) -> None:
    (look,) = LiveStore(Store.open(finished)).snapshots()
    assert look.finished
    assert look.done == look.wanted > 0
    with open_views(Store.open(finished)) as views:
        rows = views.rows("decomposition", split="evaluation", stratum="pooled").to_pylist()
    expected = {row["action"]: (row["mismatch"], row["divergence_probability"]) for row in rows}
    for one in look.divergence:
        assert (one.mismatch, one.probability) == pytest.approx(expected[one.action])
        assert one.mismatch_low is not None


def on_the_logit_scale(mean: float, half: float) -> tuple[float, float, float]:
    center, reach = special.logit(mean), half / (mean * (1 - mean))
    return mean, float(special.expit(center - reach)), float(special.expit(center + reach))


def test_the_quick_interval_is_the_textbooks() -> None:
    x = np.random.default_rng(1).random(9)
    names = [f"d{place}" for place in range(9)]
    half = stats.t.ppf(0.975, 8) * x.std(ddof=1) / 3
    assert preliminary_mean(list(x), ["a"] * 9, names) == pytest.approx(on_the_logit_scale(x.mean(), half))
    strata = ["a"] * 4 + ["b"] * 5
    mean, half = (x[:4].mean() + x[4:].mean()) / 2, stats.t.ppf(0.975, 7)
    half *= np.sqrt(x[:4].var(ddof=1) / 4 + x[4:].var(ddof=1) / 5) / 2
    assert preliminary_mean(list(x), strata, names) == pytest.approx(on_the_logit_scale(mean, half))
    pairs = [f"c{place // 2}" for place in range(8)]  # clusters of two documents
    of_pairs = x[:8].reshape(4, 2).mean(axis=1)
    mean, half = of_pairs.mean(), stats.t.ppf(0.975, 3) * of_pairs.std(ddof=1) / 2
    assert preliminary_mean(list(x[:8]), ["a"] * 8, pairs) == pytest.approx(on_the_logit_scale(mean, half))
    assert preliminary_mean([0.5], ["a"], ["c"]) == (0.5, None, None)
    assert preliminary_mean([0.0] * 24, ["a"] * 24, [str(i) for i in range(24)]) == pytest.approx(
        (0.0, 0.0, 1 - 0.025 ** (1 / 24))
    ), "none of 24 documents has diverged"


def test_a_line_for_each_change_until_all_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    first = StudySnapshot(
        "s", "m", (UnitsDone("development", "half", 2, 4),), planned=False, stored=2, derived=8, rate=0.5,
        split="development", divergence=(Divergence("half", 2, 0.25, 0.125, 0.375, 0.5, None, None),), finished=False,
    )  # fmt: skip
    last = replace(first, work=(UnitsDone("development", "half", 4, 4),), planned=True, finished=True)
    whole = replace(last, derived=12, finished=False)
    show_live(iter([[first], [replace(first, rate=0.7)], [whole], [last], [first]]), 0.0)
    said = "; preliminary, development: half R = 0.250 [0.125, 0.375], P(tau <= H) = 0.500\n"
    assert capsys.readouterr().out == (
        "s, m: 2 of 4 units, evaluation not planned yet, 8 trajectories derived, 0.50 units/s, about 4 s left"
        f"{said}s, m: 4 of 4 units, 12 trajectories derived, no estimates yet"
        f"{said}s, m: 4 of 4 units, 8 trajectories derived; finished{said}"
    )


def test_ctrl_c_ends_it_quietly(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looks = LiveStore(Store.open(finished)).snapshots()

    def interrupted() -> Iterator[list[StudySnapshot]]:
        yield [replace(look, finished=False) for look in looks]
        raise KeyboardInterrupt

    show_live(interrupted(), 0.0)
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")


def test_the_command_ends_when_the_study_is_finished(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "status", finished, "--watch")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert "trajectories derived; finished; preliminary, evaluation: " in out
