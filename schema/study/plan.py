"""``[plan]``: the questions of the evaluation, and the settings that fix its size."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field

from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import exact_fraction
from kvdrift.schema.study.section import MOST_DRAWS, MOST_LISTED, Pairs, Positive, Section, meaning
from kvdrift.schema.tables import PLAIN

FIXED: Final = "fixed"


class PlanSection(Section):
    """``[plan]``: the primary endpoints, and the settings that fix K and N."""

    baseline: str = meaning("The action with which all other actions are compared.", example="snapkv-half")
    primary: Annotated[list[str], Field(min_length=1)] = meaning(
        "The primary quantities (see `kvdrift list quantities`); all other quantities are exploratory.", example=["gap"]
    )
    replicates: Literal["auto"] | Pairs = meaning(
        'K: pairs of continuations of a document and action; "auto" chooses K from the development '
        "documents. At temperature 0 all pairs are equal, and K is 1.",
        "pairs",
        default="auto",
    )
    documents: Literal["auto"] | Positive = meaning(
        'N: evaluation documents of each stratum; "auto" chooses N from the development documents.',
        "documents",
        default="auto",
    )
    estimator: Literal["plain", "swrb", "hybrid"] = meaning(
        '"plain" generates K coupled pairs. "swrb" adds K replicates of residual branching to the pairs. '
        '"hybrid" adds them only for actions for which the development documents show a gain.',
        default=PLAIN,
    )
    development_replicates: Annotated[Pairs, Field(ge=2)] = meaning(
        "Pairs of continuations of a development document and action.", "pairs", default=16
    )
    replicates_between: Annotated[tuple[Pairs, Pairs], Field(strict=False)] = meaning(
        'The least and the most K that "auto" may choose.', "pairs", default=(16, 64)
    )
    documents_at_least: Positive = meaning('The least N that "auto" may choose.', "documents", default=2)
    target_half_width: Annotated[float, Field(gt=0, lt=1)] = meaning(
        'The half-width of primary intervals for which "auto" chooses K and N.',
        "the quantity's unit; 0.02 of a gap is 2 percentage points",
        default=0.02,
    )
    alpha: Annotated[float, Field(gt=0, lt=1)] = meaning(
        "The probability with which an interval may miss the true value: 0.05 is one in 20. The primary "
        "endpoints share alpha; each gets alpha divided by their number.",
        "probability",
        default=0.05,
    )
    interval: Literal["studentized", "percentile"] | None = meaning(
        'The method of intervals: "studentized", the default of a new plan, or "percentile", as in the paper.',
        default=None,
    )
    stopping: Literal["fixed", "sequential"] = meaning(
        '"fixed" evaluates all documents. "sequential" computes the primary intervals several times '
        "during the evaluation (looks), and stops once all primary endpoints are resolved.",
        default=FIXED,
    )
    looks: Annotated[list[str], Field(min_length=1, max_length=MOST_LISTED)] = meaning(
        "The looks of a sequential study.", "exact shares of N", default=["1/4", "1/2", "3/4", "1"]
    )
    resolve: Literal["half_width", "sign", "equivalence"] = meaning(
        "The condition that resolves an endpoint of a sequential study: its interval is as narrow as the "
        'target ("half_width"), excludes 0 ("sign"), or lies wholly inside or wholly outside ±`margin` '
        '("equivalence").',
        default="half_width",
    )
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = meaning(
        'The largest difference that counts as equivalent; needed by resolve = "equivalence".',
        "the quantity's unit",
        default=None,
    )
    variance: Literal["plain", "reduced"] = meaning(
        'The variance from which "auto" chooses K and N: that of the estimates, or that of the '
        "variance-reduced estimates.",
        default="plain",
    )
    family_size: Positive | None = meaning(
        "The number of endpoints that share alpha, if other models or studies have some of them; by default "
        "the number of endpoints of this study.",
        "endpoints",
        default=None,
    )
    draws: Annotated[int, Field(ge=100, le=MOST_DRAWS)] = meaning(
        "Bootstrap draws of primary endpoints.", "draws", default=10_000
    )
    exploratory_draws: Annotated[int, Field(ge=100, le=MOST_DRAWS)] = meaning(
        "Bootstrap draws of exploratory estimates.", "draws", default=2_000
    )

    @property
    def shares(self) -> list[Fraction]:
        """The looks as shares of N."""
        try:
            return [exact_fraction(look) for look in self.looks]
        except (ValueError, ZeroDivisionError):
            raise InputError(f"plan.looks = {self.looks}: write exact fractions of the documents, as in 1/4") from None

    def check_stopping(self) -> None:
        """Check that the keys for looks are complete, and absent without looks."""
        fields = type(self).model_fields
        given = [name for name in ("looks", "resolve", "margin") if getattr(self, name) != fields[name].default]
        if self.stopping == FIXED and given:
            raise InputError(f'plan.{given[0]}: belongs to looks; write stopping = "sequential" with it')
        if any(one >= other for one, other in pairwise([Fraction(0), *self.shares])) or self.shares[-1] != 1:
            raise InputError(f"plan.looks = {self.looks}: shares of the documents must grow to 1")
        if self.resolve == "equivalence" and self.margin is None:
            raise InputError('plan.margin: missing; resolve = "equivalence" is inside or wholly outside +-margin')
        if self.resolve != "equivalence" and self.margin is not None:
            raise InputError(f'plan.margin: belongs to resolve = "equivalence", not to "{self.resolve}"')
        if self.stopping == "sequential" and self.interval == "percentile":
            raise InputError('plan.interval = "percentile": the intervals of looks are studentized; remove it')
        if self.stopping == "sequential" and self.variance == "reduced":
            raise InputError('plan.variance = "reduced": a sequential study looks at plain estimates alone; remove it')
