"""Documents that are alike: gates on rare failures, and how many documents settle them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from kvdrift.schema.moments import SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.bootstrap import Request, estimate
from kvdrift.stats.endpoints import Decision, decide
from kvdrift.stats.ends import Likeness, most_unlike, settling_factor
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.registry import Between, Higher

STUDIES = 400  # of a cell of the page
PAGE = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
FRACTION = Between(0.0, 1.0)


def gated(
    share: float, documents: int, noise: float, margin: float, seed: int, studies: int = STUDIES
) -> list[Decision]:
    """Gates on studies of 2 x ``documents`` of which a share fails by half, as the actions of one call."""
    random = np.random.default_rng([seed, documents])
    shape = (2 * documents, studies)
    failed = 0.5 * (random.random(shape) < share)
    base = random.uniform(0.2, 0.4, shape)
    moved = base + failed + noise * random.uniform(-1, 1, shape)
    pairs = [(f"a{i:03}", f"b{i:03}") for i in range(studies)]
    actions = tuple(name for pair in pairs for name in pair)
    values = np.stack([base, moved], axis=-1).reshape(2 * documents, -1)
    names = np.array([f"document {i:03}" for i in range(2 * documents)])
    scalars = {name: values if name == "mismatch" else np.zeros(values.shape) for name in SCALAR_MOMENTS}
    strata = np.repeat(["s", "t"], documents)
    moments = DocumentMoments(names, strata, names, actions, Windows.of(128), scalars, {}, {})
    request = Request(0.9, alike_within=margin)
    found = estimate(moments, draws=500, seed=seed, request=request, quantities=["gap"], pairs=pairs).columns
    pooled = [place for place, stratum in enumerate(found["stratum"]) if stratum == "pooled"]
    return [decide(found["low"][i], found["high"][i], margin, Higher.WORSE) for i in pooled]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.25])
@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0, 2.0])
def test_what_gates_say_at_the_margin_is_what_their_page_says(share: float, noise: float) -> None:
    """400 studies a cell: the standard error is at most 2.5%, and at 5% it is 1.1%."""
    (line,) = (one for one in PAGE.splitlines() if one.startswith(f"| {100 * share:g}% |"))
    for size, cell in zip((6, 12, 24, 48), line.split("|")[2:6], strict=True):
        decisions = gated(share, size, noise * 0.5 * share, 0.5 * share, seed=5)
        wrong = decisions.count(Decision.EQUIVALENT) / STUDIES
        if noise < 1:
            assert wrong <= 0.05 + 0.033, size
        else:
            shown = [int(number) / 100 for number in re.findall(r"\d+", cell)][noise == 2]
            assert wrong == pytest.approx(shown, abs=0.03 + 2 * math.sqrt(shown * (1 - shown) / STUDIES)), size
        assert decisions.count(Decision.WORSE) / STUDIES <= 0.05 + 0.033, size


@pytest.mark.slow
def test_a_gate_passes_on_enough_documents() -> None:
    """None of 2 x 160 documents fails: at level 95% the failing share is below 1 - .05^(1/320) = .93%."""
    assert set(gated(0.0, 160, 0.0, 0.01, seed=1)) == {Decision.EQUIVALENT}
    assert set(gated(0.0, 140, 0.0, 0.01, seed=1)) == {Decision.UNRESOLVED}


def test_the_share_of_unlike_documents_is_clopper_and_pearsons() -> None:
    for unlike, clusters in ((0, 24), (1, 9), (4, 12), (9, 9)):
        expected = scipy.stats.binomtest(unlike, clusters).proportion_ci(0.95, "exact").high
        assert most_unlike(np.array(float(unlike)), np.array(float(clusters)), np.array(0.95)) == pytest.approx(
            expected
        )


def _alike(unlike: float, clusters: float, farthest: float) -> Likeness:
    values = (0.0, 0.0, unlike, clusters, farthest)
    return Likeness(*(np.array([one]) for one in values), np.array([False]))


def test_how_many_documents_settle_a_gate() -> None:
    factor = settling_factor(_alike(0, 24, 0.0), 0.9, FRACTION, 0.02)
    assert factor is not None
    assert math.ceil(24 * factor) == pytest.approx(math.log(0.05) / math.log(0.98), rel=0.02)
    assert settling_factor(_alike(2, 24, 0.5), 0.9, FRACTION, 0.02) is None, "a mean of .04 is above the margin"
    assert settling_factor(_alike(1, 24, 0.2), 0.9, FRACTION, 0.02) is not None
