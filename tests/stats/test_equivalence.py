"""Decisions on margins: by their definition, for every quantity that has a direction, and how often they are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from fixtures.refusals import refused
from fixtures.simulated_studies import PAIRS, exact_truth, simulated_study

from kvdrift.stats.bootstrap import Request, estimate, observed
from kvdrift.stats.endpoints import Decision, decidable_quantities, decidable_quantity, decide
from kvdrift.stats.quantities import DIFFERENCES, PAIR_QUANTITIES, QUANTITIES
from kvdrift.stats.registry import Higher

EQUIVALENT, WORSE, UNRESOLVED = Decision.EQUIVALENT, Decision.WORSE, Decision.UNRESOLVED

# Quantities of which more says nothing by itself. A new quantity is in this list, or says what more of it means.
NEITHER = {"written", "written_difference",
    "late_minus_early", "late_minus_early_pre_eos", "early_pre_eos_fraction", "late_pre_eos_fraction",
    "mismatch_after_agreement", "occurrence_share", "exposure_share", "rate_share", "full_minus_fixed_history",
    "full_minus_flat_extrapolation", "history_gap", "pre_eos", "eos_related", "eos_share", "generation_gap_change",
    "late_minus_early_difference", "late_minus_early_pre_eos_difference", "mismatch_after_agreement_difference",
}  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "higher_is_worse", "higher_is_better"),
    [
        (-0.10, 0.019, EQUIVALENT, UNRESOLVED),
        (-0.10, 0.02, UNRESOLVED, UNRESOLVED),  # the margin itself decides nothing
        (0.02, 0.10, UNRESOLVED, EQUIVALENT),
        (0.021, 0.10, WORSE, EQUIVALENT),
        (-0.10, -0.021, EQUIVALENT, WORSE),
        (-0.019, 0.019, EQUIVALENT, EQUIVALENT),
        (-0.50, 0.50, UNRESOLVED, UNRESOLVED),
        (None, None, UNRESOLVED, UNRESOLVED),
    ],
)
def test_an_interval_decides_by_where_the_margin_lies(
    low: float | None, high: float | None, higher_is_worse: Decision, higher_is_better: Decision
) -> None:
    assert decide(low, high, 0.02, Higher.WORSE) is higher_is_worse
    assert decide(low, high, 0.02, Higher.BETTER) is higher_is_better


def test_every_single_number_says_what_more_of_it_means_or_is_listed_here() -> None:
    silent = {name for name, one in QUANTITIES.items() if one.axis is None and one.higher is Higher.NEITHER}
    assert silent == NEITHER
    assert {name for name, one in QUANTITIES.items() if one.higher is Higher.BETTER} >= {
        "mean_entry", "mean_entry_difference", "long_agreement", "long_agreement_difference",
    }  # fmt: skip


def test_what_cannot_be_decided_on_is_refused_with_the_reason() -> None:
    assert "did you mean 'mismatch'?" in refused(decidable_quantity, "mismach")
    assert "has a value at each t" in refused(decidable_quantity, "entry_cdf")
    assert "neither higher nor lower values are better" in refused(decidable_quantity, "eos_share")


def test_a_quantity_of_actions_stands_for_its_difference() -> None:
    """The difference is the registered contrast if there is one, since a plan names that contrast."""
    names = {"mismatch": "gap", "rollout_tv": "rollout_tv_gap", "mean_entry": "mean_entry_difference", "gap": "gap"}
    assert {name: decidable_quantity(name).name for name in names} == names
    pair = ("action 0", "action 1")
    study = simulated_study(0, 6).of_actions(pair)
    for name, contrast in decidable_quantities().items():
        if QUANTITIES.get(name, contrast).kind == "contrast":  # or of answers, which the study has none of
            continue
        of_actions, of_pair = observed(study, [name], [pair])[name], observed(study, [contrast.name], [pair])
        expected = of_actions[:, 1] - of_actions[:, 0]
        np.testing.assert_array_equal(of_pair[contrast.name][:, 0], expected, err_msg=name)
    assert set(DIFFERENCES) == {name for name, one in PAIR_QUANTITIES.items() if one.kind == "action"}


def rates_of_decisions(size: int, batches: int, draws: int = 768) -> dict[str, dict[str, float]]:
    """How often ``mismatch`` and ``mean_entry`` of studies of 2 x ``size`` documents are decided at level 95%.

    By where the margin lies: at the true difference, where either answer is wrong, and away from it by 2 and by 4
    standard errors of the difference (its spread over all studies), where the first or the second answer is right.
    """
    names = {"mismatch": "gap", "mean_entry": "mean_entry_difference"}
    truth = exact_truth([(contrast, None) for contrast in names.values()])
    rows = []
    for batch in range(batches):
        study = simulated_study(batch, size)
        request = Request(1 - 2 * (1 - 0.95))
        made = estimate(study, draws=draws, seed=batch, request=request, quantities=list(names.values()), pairs=PAIRS)
        columns = [made.columns[name] for name in ("quantity", "stratum", "estimate", "low", "high")]
        rows += [row for row in zip(*columns, strict=True) if row[1] == "pooled"]
    found = {}
    for name, contrast in names.items():
        own = [row[2:] for row in rows if row[0] == contrast]
        higher = QUANTITIES[name].higher
        sign = -1 if higher is Higher.BETTER else 1
        true = sign * float(truth[contrast, None][0])
        error = float(np.std([estimate for estimate, _, _ in own]))
        rates = {"studies": float(len(own)), "standard error": error}
        for where in (-4, -2, 0, 2, 4):
            decisions = [decide(low, high, true + where * error, higher) for _, low, high in own]
            rates[f"equivalent at {where:+d}"] = decisions.count(EQUIVALENT) / len(own)
            rates[f"worse at {where:+d}"] = decisions.count(WORSE) / len(own)
        found[name] = rates
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [12, 24, 80])
def test_decisions_are_wrong_as_seldom_as_they_say_and_right_as_often_as_they_could(size: int) -> None:
    """8,000 studies, 768 draws: 5% has a standard error of 0.24%.

    By the true standard error instead of an estimated one, decisions at 2 of them would be right in 63.9%, at 4 in 99.1%.
    """
    for name, rates in rates_of_decisions(size, 64).items():
        print(size, name, {key: round(value, 4) for key, value in rates.items()})  # noqa: T201 - what is measured
        for answer in ("equivalent", "worse"):
            assert rates[f"{answer} at +0"] <= 0.065, (name, answer)
        assert rates["equivalent at +2"] >= 0.55, name
        assert rates["worse at -2"] >= 0.55, name
        assert rates["equivalent at +4"] >= 0.97, name
        assert rates["worse at -4"] >= 0.97, name
        assert rates["equivalent at -2"] <= 0.001, name
        assert rates["worse at +2"] <= 0.001, name
