"""``[study]``, ``[windows]``, ``[[documents]]`` and ``[plan]``: what is compared, on which prompts, how precisely."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field

from kvdrift.schema.errors import InputError
from kvdrift.schema.retention import exact_fraction
from kvdrift.schema.sampling import Sampling, Temperature, TopK, TopP
from kvdrift.schema.study.section import (
    LEAST_ALPHA,
    MOST_DRAWS,
    MOST_ENDPOINTS,
    MOST_LISTED,
    MOST_SHOTS,
    MOST_TOKENS,
    PART,
    Documents,
    Name,
    Pairs,
    Positive,
    Section,
    Tokens,
    meaning,
)
from kvdrift.schema.tables import PLAIN


class StudySection(Section):
    """``[study]``: name, horizon, seed, and the sampling of tokens."""

    name: Name = meaning("The study's name in `stores/NAME`, in queries and on the page.", example="my-study")
    horizon: Tokens = meaning(
        "The horizon H: how many tokens after the prompt are compared. It is 2 or more, except for "
        "finite-state systems, engines and actions of other weights. The events of a document and action are in "
        "memory together, so H times the pairs is at most 2^24.",
        "tokens",
        example=64,
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = meaning(
        "The seed of every draw: of prompts, of tokens and of resampling.", default=0
    )
    temperature: Temperature = meaning(
        "The divisor of the logits before tokens are drawn. At 0 decoding is greedy: the most probable "
        "token is taken. A list of temperatures makes one study for each temperature.",
        default=1.0,
    )
    top_p: TopP | None = meaning(
        "Tokens are drawn from the smallest set of most probable tokens whose total probability reaches this value.",
        "probability",
        default=None,
    )
    top_k: TopK | None = meaning(
        "Tokens are drawn from exactly this many most probable tokens; of equally probable tokens, those with the "
        "lowest ids are taken.",
        "tokens",
        default=None,
    )
    eos: Annotated[list[int | str], Field(max_length=MOST_LISTED)] | None = meaning(
        "The tokens that end a text, by id or by text, in place of those that the model and its chat template name. "
        "The first of them fills the positions after a side's end. An empty list lets every text go on to H.",
        default=None,
    )
    store_prompts: bool = meaning(
        "Whether the store records the tokens of prompts and the entries that each action keeps. The "
        "explorer and the views of answers' records need both.",
        default=True,
    )

    @property
    def sampling(self) -> Sampling:
        """The temperature and truncation with which both sides draw tokens."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    def check_sampling(self) -> None:
        """Check that the keys of the sampling agree with each other."""
        for name in ("top_p", "top_k") if self.sampling.greedy else ():
            if getattr(self, name) is not None:
                raise InputError(f"study.{name}: at temperature 0 the most probable token is taken; remove it")


class WindowsSection(Section):
    """``[windows]``: windows of quantities, in place of the defaults, most of which follow from the horizon."""

    cohort_bound: Tokens | None = meaning(
        "T: the branch cohort has the pairs that diverge at position T or before; H/2 by default.",
        "tokens",
        default=None,
    )
    early_last: Tokens | None = meaning("The last early lag after τ; H/8 by default.", "tokens", default=None)
    late_first: Tokens | None = meaning("The first late lag after τ; T − H/8 + 1 by default.", "tokens", default=None)
    first_block_last: Tokens | None = meaning(
        "The last position of the first block; H/4 by default.", "tokens", default=None
    )
    second_block_last: Tokens | None = meaning(
        "The last position of the second block; H/2 by default.", "tokens", default=None
    )
    agreement_run: Tokens = meaning("A run of agreements is long from this length on.", "tokens", default=16)
    saturation_threshold: Annotated[float, Field(gt=0, lt=1)] = meaning(
        "A δ above this value is saturated.", "total variation", default=0.99
    )


class DocumentsSection(Section):
    """``[[documents]]``: the documents of one stratum.

    ``kvdrift.generator.documents.registry.check_source`` checks which optional keys a source takes or needs. In a
    section read from a file, ``path`` and ``exclude`` are absolute paths.
    """

    source: str = meaning(
        'The source of the prompts: "embedded", "ruler", "helmet" or "jsonl"; "finite-state" for finite-state systems.',
        example="embedded",
    )
    tasks: list[str] = meaning("Tasks of the source; documents take them in turn.", example=["needle"], default=[])
    length: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = meaning(
        "The most tokens that a prompt has.", "tokens", example=768, needed=True, default=0
    )
    development: Documents = meaning(
        "The number of development documents, from which the plan is made. They are not part of the evaluation.",
        "documents",
        example=3,
    )
    evaluation: Documents = meaning(
        "The number of evaluation documents; the plan may take fewer. All documents of a study are made "
        "before the first is measured, so a study has at most 100,000.",
        "documents",
        example=10,
    )
    stratum: Name | None = meaning(
        "The stratum's name; by default source and length, as in `EMBEDDED-768`, or the source alone. Rows "
        "of a JSON Lines file that name another stratum are left out; a run says how many rows no section "
        "takes. A row without a stratum fits every section of its file. A study must not take a row twice; "
        "`part` divides such rows among sections.",
        default=None,
    )
    path: str | None = meaning("The file or folder from which the source reads.", default=None)
    exclude: str | None = meaning(
        "A JSON file with a list `clusters`; documents of these clusters are left out. "
        "`kvdrift confirm` writes such files.",
        default=None,
    )
    part: Annotated[str, Field(pattern=PART)] = meaning(
        'The part of the source\'s clusters to take. Studies or strata of parts "1/2" and "2/2" share no document.',
        default="1/1",
    )
    shots: Annotated[int, Field(ge=0, le=MOST_SHOTS)] | None = meaning(
        "The number of worked examples in front of a prompt; 2 by default.", "examples", default=None
    )
    chat_template: bool | None = meaning(
        "Whether a prompt is written as a chat with the template of the model's tokenizer. Rows of a JSON Lines file "
        "that have `messages` are written so in any case.",
        default=None,
    )

    @property
    def stratum_name(self) -> str:
        """The stratum's name; by default source and length, as in RULER-768."""
        return stratum_of(self.stratum, self.source, self.length)

    @property
    def part_of_clusters(self) -> tuple[int, int]:
        """``part`` as (number of the part, number of parts); different parts of a source share no cluster."""
        which, parts = self.part.split("/")
        return int(which), int(parts)


def stratum_of(stratum: str | None, source: str, length: int) -> str:
    """Return a section's stratum: the name that it gives, else source and length, or the source if length is 0."""
    return stratum or (f"{source.upper()}-{length}" if length else source)


FIXED: Final = "fixed"


class PlanSection(Section):
    """``[plan]``: the primary endpoints, and the settings that fix K and N."""

    baseline: str = meaning(
        "The action with which all other actions are compared; a study's only action is its baseline.",
        example="snapkv-half",
    )
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
    alpha: Annotated[float, Field(ge=LEAST_ALPHA, lt=1)] = meaning(
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
        "during the evaluation (interim looks), and stops once all primary endpoints are resolved.",
        default=FIXED,
    )
    looks: Annotated[list[str], Field(min_length=1, max_length=MOST_LISTED)] = meaning(
        "The interim looks of a sequential study.", "exact shares of N", default=["1/4", "1/2", "3/4", "1"]
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
    family_size: Annotated[int, Field(ge=1, le=MOST_ENDPOINTS)] | None = meaning(
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
        """The interim looks as shares of N."""
        try:
            return [exact_fraction(share) for share in self.looks]
        except (ValueError, ZeroDivisionError):
            raise InputError(
                f'plan.looks = {self.looks}: write exact fractions of the documents, as in ["1/4", "1/2", "1"]'
            ) from None

    def check_stopping(self) -> None:
        """Check that the keys for interim looks are complete, and absent without interim looks."""
        fields = type(self).model_fields
        written = [name for name in ("looks", "resolve", "margin") if getattr(self, name) != fields[name].default]
        if self.stopping == FIXED and written:
            raise InputError(f'plan.{written[0]}: belongs to interim looks; write stopping = "sequential" with it')
        if (
            any(share >= next_share for share, next_share in pairwise([Fraction(0), *self.shares]))
            or self.shares[-1] != 1
        ):
            raise InputError(
                f"plan.looks = {self.looks}: the shares of the documents must increase, the first above 0, the last 1"
            )
        if self.resolve == "equivalence" and self.margin is None:
            raise InputError(
                'plan.margin: missing; resolve = "equivalence" needs it: an interval must lie wholly inside or wholly '
                "outside +-margin"
            )
        if self.resolve != "equivalence" and self.margin is not None:
            raise InputError(f'plan.margin: belongs to resolve = "equivalence", not to "{self.resolve}"')
        if self.stopping == "sequential" and self.interval == "percentile":
            raise InputError('plan.interval = "percentile": the intervals of interim looks are studentized; remove it')
        if self.stopping == "sequential" and self.variance == "reduced":
            raise InputError('plan.variance = "reduced": a sequential study stops by plain estimates alone; remove it')
