"""Studies with other sampling settings than the full softmax: exact values beside views, keys of a study file, and greedy plans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fixtures.finite_study import write_finite_study
from fixtures.small_study import evaluate, run_of, write_study
from fixtures.study_files import load_study
from oracles.plain_distributions import plain_distribution

from kvdrift.flows.plan.frozen_plan import grown_plan, require_plan
from kvdrift.flows.plan.making import NOTHING, size_bounds
from kvdrift.flows.run import stages
from kvdrift.flows.run.checks import remarks
from kvdrift.generator.finite.study_systems import study_systems
from kvdrift.schema.errors import InputError
from kvdrift.schema.frozen_text import with_measured
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.study import load_studies
from kvdrift.sql.catalog import open_views

HALF = ("seed = 24", "seed = 24\ntemperature = 0.5")


def test_tables_of_systems_have_the_study_s_law(tmp_path: Path) -> None:
    plain, half = (load_study(write_finite_study(tmp_path, *given)) for given in ((), (HALF,)))
    systems = [[*study_systems(study)["evaluation"]["binary"]] for study in (plain, half)]
    for before, after in zip(*systems, strict=True):
        for action in (None, "mixture"):
            for table, made in zip(before.distributions(action), after.distributions(action), strict=True):
                wanted = [plain_distribution(np.log(row).tolist(), Sampling(0.5)) for row in table]
                np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-14)


def test_views_agree_with_enumeration_at_temperature_one_half(tmp_path: Path) -> None:
    """For each of 3 systems, R and O of 2,000 pairs are within 5 standard errors: a false failure is below 1e-5.

    The exact values are those of the sharper laws, which part less often than the tables' own laws.
    """
    changes = [
        HALF, ("replicates = 16", "replicates = 2000"), ("development = 4", "development = 2"),
        ("evaluation = 6", "evaluation = 3"), ("documents = 6", "documents = 3"),
    ]  # fmt: skip
    run = run_of(load_study(write_finite_study(tmp_path, *changes)), tmp_path / "store")
    evaluate(run)
    with open_views(run.store) as views:
        rows = views.table(
            "select doc, action, quantity, value, mean(mismatches / 4), stddev(mismatches / 4) / sqrt(count(*)), "
            "mean((tau is not null)::double / 4), stddev((tau is not null)::double / 4) / sqrt(count(*)), count(*) "
            "from exact_values join analyzed_trajectories using (study, model, doc, action) "
            "where quantity in ('mismatch', 'occurrence') group by all"
        ).to_pylist()
        (row,) = views.rows("studies").to_pylist()
    assert Sampling.of(row) == Sampling(0.5)
    evaluated = [list(row.values()) for row in rows if row["count_star()"] == 2000]
    assert len(evaluated) == 2 * 3
    for _, _, quantity, exact, mismatch, mismatch_error, occurrence, occurrence_error, _ in evaluated:
        found, error = (mismatch, mismatch_error) if quantity == "mismatch" else (occurrence, occurrence_error)
        assert abs(found - exact) < 5 * error, quantity


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("temperature = -0.5", "study.temperature = -0.5: .* 0"),
        ("temperature = inf", "study.temperature = inf: .*"),
        ("top_p = 0", "study.top_p = 0: .* 0"),
        ("top_p = 1.5", "study.top_p = 1.5: .* 1"),
        ("top_k = 0", "study.top_k = 0: .* 1"),
        ("temperature = 0\ntop_p = 0.9", "study.top_p: at temperature 0 .*"),
    ],
)
def test_what_is_no_law_is_refused(tmp_path: Path, written: str, line: str) -> None:
    with pytest.raises(InputError, match=f"{line}$"):
        load_study(write_study(tmp_path, ("seed = 3", f"seed = 3\n{written}")))


def test_the_default_law_changes_no_identity(tmp_path: Path) -> None:
    plain, same, other = (
        load_study(write_study(tmp_path, ("seed = 3", f"seed = 3\n{written}")))
        for written in ("", "temperature = 1\ntop_p = 1", "temperature = 0.7\ntop_p = 0.9\ntop_k = 20")
    )
    assert (plain.sampling, plain.settings) == (FULL_SOFTMAX, same.settings)
    assert other.sampling == Sampling(0.7, 0.9, 20)
    assert json.loads(other.settings)["study"].items() >= {"temperature": 0.7, "top_p": 0.9, "top_k": 20}.items()
    assert other.sha256 != plain.sha256


def test_one_replicate_of_a_greedy_law_is_enough(tmp_path: Path) -> None:
    """One replicate is enough even if the study file asks for more."""
    greedy = ("seed = 3", "seed = 3\ntemperature = 0")
    auto = ("replicates = 5\n", "")
    bounds = [
        size_bounds(load_study(write_study(tmp_path, *given)), NOTHING)[0]
        for given in ([greedy, auto], [greedy], [auto])
    ]
    assert bounds == [(1, 1), (1, 1), (16, 64)]


def test_replicates_that_are_equal_are_said_to_be(tmp_path: Path) -> None:
    def said(law: str, *changes: tuple[str, str]) -> list[str]:
        studies = load_studies(write_study(tmp_path, ("seed = 3", f"seed = 3\ntemperature = {law}"), *changes))
        return remarks([run_of(study, tmp_path) for study in studies])

    for law, name in (("0", "small"), ("[0.7, 0]", "small-t0")):
        (line,) = said(law)
        assert line.startswith(f"plan.replicates = 5: a plan of study '{name}' takes 1")
    assert said("0", ("replicates = 5", "replicates = 1")) == said("0", ("replicates = 5\n", "")) == said("0.7") == []
    (one_token,) = said("0.7\ntop_k = 1")
    assert one_token.startswith("study.top_k = 1: ")


def test_a_greedy_plan_stands_whatever_is_asked(tmp_path: Path) -> None:
    """Its expected time ignores development replicates."""
    greedy = ("seed = 24", "seed = 24\ntemperature = 0")
    study = load_study(write_finite_study(tmp_path, greedy))
    run = run_of(study, tmp_path / "store")
    stages.prepare(run)
    stages.develop(run)
    stages.derive(run)
    stages.plan(run)
    plan = require_plan(run.store, study)
    assert (study.plan.replicates, plan.replicates) == (16, 1)
    seconds = with_measured(plan.content)["development"]
    assert seconds["seconds_per_replicate"] == 0 < seconds["seconds_per_document"]
    more = load_study(write_finite_study(tmp_path, greedy, ("replicates = 16", "replicates = 20")))
    assert grown_plan(plan, more) is plan
