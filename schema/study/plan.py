"""``[plan]``: what the evaluation must answer, and what fixes its size."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field

from schema.errors import InputError
from schema.retention import exact_fraction
from schema.study.section import MOST_DRAWS, MOST_LISTED, Pairs, Positive, Section, meaning
from schema.tables import PLAIN

FIXED: Final = "fixed"


class PlanSection(Section):
    """``[plan]``: the primary endpoints and what fixes K and N."""

    baseline: Annotated[str, meaning("The action that the others are held against.", example="snapkv-half")]
    primary: Annotated[
        list[str],
        Field(min_length=1),
        meaning(
            "The quantities that the study is about (`kvdrift list quantities`); the others are exploratory.",
            example=["gap"],
        ),
    ]
    replicates: Annotated[
        Literal["auto"] | Pairs,
        meaning('K: pairs of continuations of a document and action; "auto" chooses it from the development documents. '
                "At temperature 0 all are the same, and K is 1.", "pairs"),
    ] = "auto"  # fmt: skip
    documents: Annotated[
        Literal["auto"] | Positive,
        meaning('N: evaluation documents of each stratum; "auto" chooses it from the development documents.',
                "documents"),
    ] = "auto"  # fmt: skip
    estimator: Annotated[
        Literal["plain", "swrb", "hybrid"],
        meaning(
            '"swrb" adds K replicates of residual branching to the K coupled pairs; "hybrid" does so only for actions '
            "where the development documents show that it pays."
        ),
    ] = PLAIN
    development_replicates: Annotated[
        Annotated[Pairs, Field(ge=2)], meaning("Pairs of continuations of a development document and action.", "pairs")
    ] = 16
    replicates_between: Annotated[
        tuple[Pairs, Pairs],
        Field(strict=False),
        meaning('The least and the most K that "auto" may choose.', "pairs"),
    ] = (16, 64)
    documents_at_least: Annotated[Positive, meaning('The least N that "auto" may choose.', "documents")] = 2
    target_half_width: Annotated[
        float,
        Field(gt=0, lt=1),
        meaning('The half-width of a primary interval that "auto" is to reach.', "that of the quantity; 0.02 of a gap "
                "is 2 percentage points"),
    ] = 0.02  # fmt: skip
    alpha: Annotated[
        float,
        Field(gt=0, lt=1),
        meaning(
            "How often an interval may miss: one in 20 at 0.05. The primary endpoints share it, each at alpha over "
            "their number.",
            "probability",
        ),
    ] = 0.05
    interval: Annotated[
        Literal["studentized", "percentile"] | None,
        meaning('How intervals are made: "studentized", the default of a new plan, or "percentile", as in the paper.'),
    ] = None
    stopping: Annotated[
        Literal["fixed", "sequential"],
        meaning('"sequential" looks at the evaluation on the way, and stops when all primary endpoints are resolved.'),
    ] = FIXED
    looks: Annotated[
        list[str],
        Field(min_length=1, max_length=MOST_LISTED),
        meaning("When a sequential study is looked at.", "exact shares of N"),
    ] = ["1/4", "1/2", "3/4", "1"]  # noqa: RUF012 - pydantic copies it
    resolve: Annotated[
        Literal["half_width", "sign", "equivalence"],
        meaning(
            "What resolves an endpoint of a sequential study: its interval is as narrow as the target, excludes 0, or "
            "lies inside or wholly outside ±`margin`."
        ),
    ] = "half_width"
    margin: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        meaning('How much worse is still equivalent; needed by resolve = "equivalence".', "that of the quantity"),
    ] = None
    variance: Annotated[
        Literal["plain", "reduced"],
        meaning('What "auto" chooses K and N by: the variance of the estimates, or that of the reduced ones.'),
    ] = "plain"
    family_size: Annotated[
        Positive | None,
        meaning(
            "How many endpoints share alpha, where other models or studies have some of them; by default those of this "
            "study.",
            "endpoints",
        ),
    ] = None
    draws: Annotated[int, Field(ge=100, le=MOST_DRAWS), meaning("Bootstrap draws of primary endpoints.", "draws")] = (
        10_000
    )
    exploratory_draws: Annotated[
        int, Field(ge=100, le=MOST_DRAWS), meaning("Bootstrap draws of all else.", "draws")
    ] = 2_000

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
            raise InputError('plan.variance = "reduced": looks are at the estimates as they are; remove it')
